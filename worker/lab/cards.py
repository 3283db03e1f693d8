"""The card of what is pushed without one: README.md, as the hub reads it."""

import json
from pathlib import Path
from typing import Any

from shared.version import VERSION

CARD = "README.md"


def card_of(folder: Path, repo: str, kind: str) -> str:
    """Of a model, an adapter, or a data set."""
    if kind == "dataset":
        return _dataset(folder, repo)
    adapter = _json(folder / "adapter_config.json")
    if adapter:
        return _adapter(adapter, repo)
    origin = str(_json(folder / "mlxd.json").get("origin", ""))
    front = {"library_name": "mlx", "pipeline_tag": "text-generation", "tags": ["mlx"]}
    return _card(
        front, repo, [f"A model for MLX, made by mlxd {VERSION}{f' of {origin}' if origin else ''}."]
    )


def _adapter(config: dict[str, Any], repo: str) -> str:
    base = next(
        (str(config[key]) for key in ("base_model", "base_model_name_or_path") if config.get(key)), ""
    )
    is_public = base.count("/") == 1 and not base.startswith(("/", ".", "~"))
    kind = str(config.get("fine_tune_type") or "lora")
    front: dict[str, Any] = {"library_name": "mlx", "tags": ["mlx", kind]}
    if is_public:
        front["base_model"] = base
    numbers = config.get("lora_parameters") or {}
    about = f"An adapter ({kind}, rank {numbers.get('rank', '?')}, scale {numbers.get('scale', '?')})"
    return _card(
        front,
        repo,
        [f"{about} in mlx-lm's layout{f', for {base}' if is_public else ''}, trained by mlxd {VERSION}."],
    )


def _dataset(folder: Path, repo: str) -> str:
    report = _json(folder / "report.json")
    front: dict[str, Any] = {"task_categories": ["text-generation"], "tags": ["mlxd"]}
    if report.get("model"):
        front["tags"] = ["mlxd", "synthetic"]
    lines = [
        f"A data set of {report.get('rows', '?')} rows ({report.get('format', '?')}), made by mlxd {VERSION}."
    ]
    if report:
        lines += [
            "",
            "| | |",
            "|---|---|",
            f"| template | {report.get('template', '')} |",
            f"| rows to train on | {report.get('train', '')} |",
            f"| rows held out | {report.get('valid', '')} |",
        ]
        if report.get("model"):
            lines.append(f"| written by | {report['model']} |")
    return _card(front, repo, lines)


def _card(front: dict[str, Any], repo: str, lines: list[str]) -> str:
    """Its values are written as JSON, which YAML reads."""
    head = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in front.items()]
    return "\n".join(["---", *head, "---", "", f"# {repo.rpartition('/')[2]}", "", *lines, ""])


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
