"""A profile's defaults under a request's own fields. Pure."""

from typing import Any

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
    return replace(
        asked,
        prompts=[_with_kwargs(prompt, profile.kwargs) for prompt in asked.prompts],
        sampling=replace(asked.sampling, **sampling),
        max_tokens=profile.max_tokens if asked.max_tokens is None else asked.max_tokens,
        max_context=asked.max_context or profile.max_context or 0,
    )


def _with_kwargs(prompt: wire.Prompt, kwargs: dict[str, Any]) -> wire.Prompt:
    if not isinstance(prompt, wire.ChatPrompt) or not kwargs:
        return prompt
    return replace(prompt, template_kwargs={**kwargs, **prompt.template_kwargs})
