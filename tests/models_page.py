"""`python -m tests.models_page` measures every family and writes the tables of `docs/models.md`.

Figures are of a run on the machine at hand; the rest of a row comes from the code's own tables. `tests/test_docs.py`
compares a page with `rows`, but for the figures, which it only holds to their bound.
"""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shared.kv_layout import LayerKv, kv_layers
from shared.model_config import normalise
from shared.providers import MLX_LM_FAMILIES
from tests.oracles import checkpoints
from tests.worker.models.running import logits_of
from worker.jobs.gguf_families import FAMILIES as GGUF
from worker.models import FAMILIES, load_model

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
TRANSFORMERS = "5.24.0"
CUTS: tuple[list[int], ...] = ([], [17], list(range(1, 64)))  # one pass, two pieces, token by token
HEADER = (
    "| family | `model_type` | checked against | max abs logit difference | batched | cache kinds | quantizations | "
    "GGUF |",
    "|---|---|---|---|---|---|---|---|",
)
_PART = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def families() -> dict[str, list[str]]:
    """The `model_type`s of each file of `worker/models`, by its name."""
    found: dict[str, list[str]] = {}
    for model_type, build in FAMILIES.items():
        found.setdefault(build.__module__.rpartition(".")[2], []).append(model_type)
    return found


def cases_of(types: list[str]) -> list[str]:
    """The oracle cases of these `model_type`s."""
    return [name for name in checkpoints.names() if checkpoints.case(name)[0]["model_type"] in types]


def difference(name: str) -> float:
    """The greatest absolute difference of a logit from transformers', over all ways to cut the prompt."""
    expected = checkpoints.reference(name)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(checkpoints.write_case(name, Path(folder) / name)).model
        found = [logits_of(model, expected["input_ids"], cuts) for cuts in CUTS]
    return max(float(np.abs(each - expected["logits"]).max()) for each in found)


def row(family: str, types: list[str], figure: str) -> str:
    """The row of a family, with its figure as it is given."""
    cases = cases_of(types)
    kinds = sorted({kind for name in cases for kind in _kinds(name)})
    kept = "affine 2 to 8 bits, mxfp4, mxfp8, nvfp4" + ("; KV in 8 or 4 bits" if "full" in kinds else "")
    files = [f"`{name}`" for name, one in GGUF.items() if one.model_type in types]
    return " | ".join(
        (
            f"| {family}",
            ", ".join(f"`{one}`" for one in types),
            f"transformers {TRANSFORMERS}: {', '.join(cases)}",
            figure,
            "yes",
            ", ".join(kinds),
            kept,
            (", ".join(files) or "no") + " |",
        )
    )


def rows(figures: dict[str, str]) -> list[str]:
    """The table of native families, with the figures of `figures` by family."""
    return [*HEADER, *(row(name, types, figures[name]) for name, types in families().items())]


def foreign() -> str:
    """What the extra serves beside the native families."""
    return ", ".join(f"`{name}`" for name in sorted(MLX_LM_FAMILIES - set(FAMILIES), key=str.lower))


def listed(text: str) -> dict[str, str]:
    """Figures by family, as a page has them."""
    found = re.findall(r"^\| (\w+) \|[^|]*\|[^|]*\| ([\d.e-]+) \|", text, re.MULTILINE)
    return dict(found)


def parts(figures: dict[str, str]) -> dict[str, str]:
    """The generated parts of the page."""
    return {"families": "\n".join(rows(figures)), "mlx_lm": foreign()}


def updated(text: str, made: dict[str, str]) -> str:
    """The page with its parts as given."""
    return _PART.sub(lambda match: f"{match[1]}{made[match[2]]}\n{match[3]}", text)


def _kinds(name: str) -> Iterator[str]:
    config = normalise(dict(checkpoints.case(name)[0]))
    for layer in kv_layers(config):
        yield _kind(layer, latent="kv_lora_rank" in config)


def _kind(layer: LayerKv, *, latent: bool) -> str:
    if layer.is_recurrent:
        return "recurrent"
    return "latent" if latent else "sliding" if layer.window else "full"


def main() -> None:
    figures = {}
    for name, types in families().items():
        figures[name] = f"{max(difference(case) for case in cases_of(types)):.1e}"
        print(name, figures[name])
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), parts(figures)), encoding="utf-8")


if __name__ == "__main__":
    main()
