"""Everything one model worker owns besides its engine: the facts, the texts, the limits."""

from dataclasses import dataclass

from shared.wire import ModelFacts, Sampling
from worker.text.detokenizer import DetokenizerFactory
from worker.text.reasoning import ReasoningFormat
from worker.text.template import ChatTemplate
from worker.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class ModelContext:
    """One model, ready to be asked. The weights live in the engine, on its thread."""

    model_id: str
    facts: ModelFacts
    tokenizer: TextTokenizer
    detokenizers: DetokenizerFactory
    template: ChatTemplate
    reasoning: ReasoningFormat | None
    eos: frozenset[int]
    defaults: Sampling

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.facts.context
