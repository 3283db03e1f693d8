"""Data sets by templates: the table of what makes the rows of each. Nothing here needs mlx.

A module has `async plan(kit) -> Plan` and `async make(unit, kit) -> Made`; it is imported when it is asked for.
"""

import importlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from shared.lab_templates import TEMPLATES
from worker.lab.dataset.form import Kit, Plan
from worker.lab.dataset.working import Make


class Maker(NamedTuple):
    """One template's functions."""

    plan: Callable[[Kit], Awaitable[Plan]]
    make: Make


MODULES: dict[str, str] = {
    name: f"worker.lab.dataset.{name}"
    for name in (
        "sft_qa_pairs",
        "dpo_pref_pairs",
        "code_completion",
        "hf_dataset_import",
        "format_conversion",
        "style_transfer",
        "self_instruct",
        "prompt_reconstruction",
        "multi_turn_chat",
        "tool_use_traces",
        "rag_qa",
        "cot_synthesis",
        "verified_code",
    )
}
assert MODULES.keys() == TEMPLATES.keys()


def maker_of(template: str) -> Maker:
    """Of a template of the table."""
    module = importlib.import_module(MODULES[template])
    return Maker(module.plan, module.make)
