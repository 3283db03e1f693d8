"""The files beside the weights of the result: config, tokenizer, template, and a card that says how it was made."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.checkpoint import INDEX
from shared.lab import Quantize
from shared.units import format_bytes
from worker.measure.compare import Measured
from worker.quantize.layout import Source
from worker.quantize.recipe import Recipe, Size

CARD, README, SENSITIVITY = "mlxd.json", "README.md", "sensitivity.json"
_OWN = (INDEX, CARD, README, SENSITIVITY, "config.json")
_COPIED = (".json", ".jsonl", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md", "")
_SMALL = 1 << 20
_QUIET = ("rotary_emb", "lm_head", "ranges")
"""Parts that are left out without a word: nothing is missing without them."""


def write_config(source: Source, recipe: Recipe, folder: Path) -> None:
    """`config.json` with the quantization, under both names that are in use."""
    quantization = recipe.written(source.kept)
    config = {**source.written, "quantization": quantization, "quantization_config": quantization}
    _write_json(folder / "config.json", dict(sorted(config.items())))


def write_index(weight_map: Mapping[str, str], size: Size, folder: Path) -> None:
    """Which tensor is in which file; of a single file nothing need be said."""
    if len(set(weight_map.values())) > 1:
        metadata = {"total_size": size.num_bytes, "total_parameters": size.params}
        _write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(weight_map)})


def copy_rest(path: Path, folder: Path) -> None:
    """Tokenizer, template, generation settings, licence; not what others made of the model, which lies beside it."""
    for file in sorted(path.iterdir()):
        if file.is_file() and file.suffix in _COPIED and file.name not in _OWN and file.name[0] != ".":
            shutil.copyfile(file, folder / file.name)
        elif file.is_dir() and not file.name.startswith("."):
            _copy_settings(file, folder / file.name)


def _copy_settings(path: Path, folder: Path) -> None:
    """Such as sentence-transformers has in folders: small JSON files."""
    for file in sorted(path.glob("*.json")):
        if file.is_file() and file.stat().st_size <= _SMALL:
            folder.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / file.name)


def write_card(spec: Quantize, name: str, told: Sequence[tuple[str, str]], folder: Path, job: str) -> None:
    """`README.md`, and `mlxd.json` for the library. `told`: the rows of its table."""
    base = spec.model_id or Path(spec.model).name
    front = ["---", "library_name: mlx", "pipeline_tag: text-generation", "tags:", "- mlx", "- quantized"]
    if _is_of_the_hub(base):
        front.append(f"base_model: {base}")
    rows = [f"| {what} | {value} |" for what, value in told]
    text = [
        *(*front, "---", "", f"# {name}", ""),
        *(f"{base}, quantized by mlxd.", "", "| | |", "|---|---|", *rows, ""),
        *("`config.json` says of each module how it is quantized; mlxd and mlx-lm load it.", ""),
    ]
    (folder / README).write_text("\n".join(text), encoding="utf-8")
    _write_json(
        folder / CARD, {"name": name, "origin": f"{base}, quantized", **({"job": job} if job else {})}
    )


def rows_of(
    spec: Quantize, source: Source, recipe: Recipe, size: Size, skipped: Sequence[str]
) -> list[tuple[str, str]]:
    """What the card says of the recipe."""
    general = recipe.general
    scheme = f"{general.mode}, {general.bits} bits in groups of {general.group_size}"
    if spec.target_bpw is not None:
        counts: dict[int, int] = {}
        for matrix in recipe.open:
            bits = recipe.schemes[matrix.module].bits
            counts[bits] = counts.get(bits, 0) + 1
        shares = ", ".join(f"{bits} bits: {counts[bits]} modules" for bits in sorted(counts))
        scheme = f"{general.mode} in groups of {general.group_size}, mixed by sensitivity ({shares})"
    rows = [
        ("recipe", scheme),
        ("bits a weight", f"{size.bits_per_weight:.3f}"),
        ("weights", format_bytes(size.num_bytes)),
    ]
    if spec.target_bpw is not None:
        rows.append(("asked for", f"{spec.target_bpw:g} bits a weight, of {candidates_of(spec)} bits"))
        rows.append(
            ("calibration", f"{(spec.calibration and Path(spec.calibration).name) or 'the text of mlxd'}")
        )
    if spec.rotate:
        rows.append(("rotated", f"by a random Hadamard matrix of seed {spec.rotation_seed}, norms folded in"))
    if source.was:
        rows.append(("source", f"was {source.was} and was multiplied out first; what that lost stays lost"))
    if source.kept:
        rows.append(("left as they were", f"{len(source.kept)} modules of experts in mxfp4"))
    if skipped:
        rows.append(("not quantized", f"{len(skipped)} modules, whose inputs do not divide into groups"))
    if parts := [part for part in source.left_out if part not in _QUIET]:
        rows.append(("left out", ", ".join(parts)))
    return rows


def measured_rows(found: Measured) -> list[tuple[str, str]]:
    """What the card says of the result beside its source."""
    own, reference, apart = found.perplexity, found.reference, found.divergence
    assert reference is not None
    assert apart is not None
    return [
        (
            "KL to the source",
            f"{apart.mean:.5f} nats a token (median {apart.median:.5f}, p95 {apart.p95:.5f})",
        ),
        ("same likeliest token", f"{apart.same_top:.1%}"),
        (
            "perplexity",
            f"{own.value:.3f} ± {own.error:.3f}, the source {reference.value:.3f} ± {reference.error:.3f}",
        ),
        (
            "measured on",
            f"{own.tokens} tokens of the text that comes with mlxd, none of it used for calibration",
        ),
    ]


def candidates_of(spec: Quantize) -> str:
    """The candidates for a person."""
    return ", ".join(map(str, sorted(set(spec.candidate_bits))))


def _is_of_the_hub(base: str) -> bool:
    return base.count("/") == 1 and not base.startswith("/")


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
