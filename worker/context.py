"""Everything one model worker owns besides its engine: the facts, the texts, the limits."""

import asyncio
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shared.control import LaunchModel
from shared.errors import Failure
from shared.files import decode_json
from shared.wire import ModelFacts, Sampling
from worker.engine.engine import Loaded
from worker.engine.grammar import GrammarCompiler
from worker.engine.kv_budget import KvBudget
from worker.load import Loading
from worker.text.detokenizer import DetokenizerFactory
from worker.text.reasoning import ReasoningFormat, detect_format
from worker.text.template import ChatTemplate, load_template
from worker.text.tokenizer import TextTokenizer, load_tokenizer
from worker.text.toolcalls import detect
from worker.text.toolcalls.form import Format

FALLBACK_CONTEXT = 4096  # tokens, when the checkpoint does not say


@dataclass(frozen=True)
class ModelContext:
    """One model, ready to be asked. The weights live in the engine, on its thread."""

    model_id: str
    facts: ModelFacts
    tokenizer: TextTokenizer
    detokenizers: DetokenizerFactory
    template: ChatTemplate
    reasoning: ReasoningFormat | None
    calls: Format | None
    eos: frozenset[int]
    defaults: Sampling
    kv: KvBudget
    grammars: GrammarCompiler
    loaded: Loaded  # the engine's; here for its sizes

    @cached_property
    def xtc_keep(self) -> tuple[int, ...]:
        """Ids that XTC never takes away: the ends of an answer, and of a line."""
        lines = (self.tokenizer.encode_rendered(text) for text in ("\n", "\n\n"))
        return (*sorted(self.eos), *dict.fromkeys(ids[0] for ids in lines if len(ids) == 1))

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.facts.context


async def open_context(launch: LaunchModel, loading: Loading) -> ModelContext:
    """Read the texts of the model and wait for its weights. Raises `Refused` (bad_checkpoint, …)."""
    path, checkpoint = Path(launch.path), loading.checkpoint
    tokenizer = load_tokenizer(path)
    template = load_template(path, tokenizer.config, tokenizer.special, as_sent=launch.messages == "as_sent")
    detokenizers = DetokenizerFactory(tokenizer)
    defaults = read_sampling_defaults(path)
    eos = set(checkpoint.eos_ids)
    if tokenizer.eos_id is not None:
        eos.add(tokenizer.eos_id)
    reasoning = detect_format(template.source())
    if reasoning is not None and tokenizer.core.token_to_id(reasoning.open) in tokenizer.special_ids:
        reasoning = reasoning._replace(anywhere=True)  # no text can look like it
    calls = detect(template.source(tools=True))
    if calls is not None:
        ends = (tokenizer.core.token_to_id(mark) for mark in calls.ends)
        eos |= {token for token in ends if token in tokenizer.special_ids}
    context_size = checkpoint.context or FALLBACK_CONTEXT
    if launch.max_context:
        context_size = min(context_size, launch.max_context)
    loaded = await asyncio.wrap_future(loading.weights)
    held = loaded.description
    facts = ModelFacts(
        family=checkpoint.model_type,
        context=context_size,
        vocab_size=int(checkpoint.config["vocab_size"]),
        eos_ids=sorted(eos),
        dtype=held["dtype"],
        quantization=checkpoint.quantization,
        weights_bytes=held["weights_bytes"],
        kv_bytes_per_token=held["kv_bytes_per_token"],
        reasoning=reasoning is not None,
        tools=calls.name if calls is not None else "",
        has_chat_template=bool(template.sources),
        device=held["device"],
        blas=os.environ.get("MLXD_BLAS_NAME", ""),
        defaults=defaults,
        kind=checkpoint.kind,
        dimensions=0
        if checkpoint.kind == "reranker" or isinstance(loaded.pooling, Failure)
        else loaded.pooling.width,
    )
    return ModelContext(
        launch.model_id,
        facts,
        tokenizer,
        detokenizers,
        template,
        reasoning,
        calls,
        frozenset(eos),
        defaults,
        loaded.kv,
        GrammarCompiler(tokenizer, frozenset(eos), facts.vocab_size),
        loaded,
    )


def read_sampling_defaults(path: Path) -> Sampling:
    """The numeric sampling fields of `generation_config.json`; a missing or broken file means none."""
    try:
        found = decode_json((path / "generation_config.json").read_bytes())
    except (OSError, ValueError):
        return Sampling()
    if not isinstance(found, dict):
        return Sampling()

    def number(name: str, low: float, high: float) -> Any:
        value = found.get(name)
        good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        return value if good else None

    top_k = number("top_k", 0, 1 << 31)
    top_p = number("top_p", 0, 1)
    return Sampling(
        temperature=number("temperature", 0, 100),
        top_p=top_p or None,
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p", 0, 1),
        repetition_penalty=number("repetition_penalty", 1e-3, 1e3),
    )
