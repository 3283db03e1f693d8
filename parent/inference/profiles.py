"""A profile's defaults under a request's own fields. Pure."""

from msgspec.structs import replace

from parent.model_options import Profile
from parent.protocols.base import DecodedRequest
from shared import wire

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def apply(asked: DecodedRequest, profile: Profile | None) -> DecodedRequest:
    """The request with what it left open filled in from the profile."""
    if profile is None:
        return asked
    sampling = {
        name: getattr(profile, name)
        for name in _SAMPLING
        if getattr(asked.sampling, name) is None and getattr(profile, name) is not None
    }
    prompt = asked.prompt
    if isinstance(prompt, wire.ChatPrompt) and profile.kwargs:
        prompt = replace(prompt, template_kwargs={**profile.kwargs, **prompt.template_kwargs})
    return replace(
        asked,
        prompt=prompt,
        sampling=replace(asked.sampling, **sampling),
        max_tokens=profile.max_tokens if asked.max_tokens is None else asked.max_tokens,
        max_context=asked.max_context or profile.max_context or 0,
    )
