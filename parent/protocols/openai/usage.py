"""`usage` of OpenAI's formats: of a whole answer, and as a stream goes on. Pure."""

import msgspec

from shared import wire


class PromptDetails(msgspec.Struct, frozen=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """`usage.completion_tokens_details`."""

    reasoning_tokens: int


class OpenAiUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """`lane`, once it is known, says how the request was scheduled."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    lane: str = ""


class Tally:
    """Counts the tokens of all choices. A prompt counts once, however often it is answered."""

    def __init__(self, num_choices: int, n: int) -> None:
        self._n = n
        self._used = [wire.Usage(0, 0)] * num_choices
        self._lanes = [""] * num_choices

    def take(self, events: list[wire.Event], choice: int) -> None:
        """Events that end nothing; every token that shows counts."""
        used = self._used[choice]
        prompt, cached = used.prompt_tokens, used.cached_tokens
        completion, reasoning = used.completion_tokens, used.reasoning_tokens
        for event in events:
            if isinstance(event, wire.Started):
                prompt, cached = event.prompt_tokens, event.cached_tokens
            elif isinstance(event, (wire.Text, wire.Reasoning, wire.ToolCall)):
                completion += len(event.ids)
                reasoning += len(event.ids) if isinstance(event, wire.Reasoning) else 0
        self._used[choice] = wire.Usage(prompt, completion, cached, reasoning)

    def finish(self, finish: wire.Finish, choice: int) -> None:
        """The exact numbers of a choice."""
        self._used[choice], self._lanes[choice] = finish.usage, finish.lane

    def total(self) -> OpenAiUsage:
        """So far."""
        prompts = self._used[:: self._n]
        prompt = sum(used.prompt_tokens for used in prompts)
        completion = sum(used.completion_tokens for used in self._used)
        return OpenAiUsage(
            prompt,
            completion,
            prompt + completion,
            PromptDetails(sum(used.cached_tokens for used in prompts)),
            CompletionDetails(sum(used.reasoning_tokens for used in self._used)),
            self._lanes[0],
        )


def usage_of(finishes: list[wire.Finish], n: int) -> OpenAiUsage:
    """Of a whole answer."""
    tally = Tally(len(finishes), n)
    for choice, finish in enumerate(finishes):
        tally.finish(finish, choice)
    return tally.total()
