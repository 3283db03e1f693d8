"""`python -m tests.docs` writes the generated parts of `docs/` and `deploy/config.example.toml` from the code.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`. `tests/test_docs.py` fails when
one is out of date.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from parent.config import fields
from parent.values import Field, as_written

ROOT = Path(__file__).resolve().parent.parent
_PART = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def generate(name: str) -> str:
    """The text of the part: a table of the settings, or what a module prints when it is run."""
    if name == "settings":
        return settings_table()
    command = [sys.executable, "-m", name]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() + "\n"


def settings_table() -> str:
    rows = ["| setting | flag | variable | default | what it is |", "|---|---|---|---|---|"]
    for known in fields().values():
        choices = f" ({', '.join(known.choices)})" if known.choices else ""
        about = f"{known.description}{choices}"
        flags = ", ".join(f"`{flag}`" for flag in known.flags)
        rows.append(f"| `{known.name}` | {flags} | `{known.variable}` | {shown(known)} | {about} |")
    return "\n".join(rows) + "\n"


def shown(known: Field) -> str:
    """The default as a person would write it, in backticks."""
    return f"`{toml_value(known)}`"


def toml_value(known: Field) -> str:
    """The default as it stands in a TOML file."""
    value: Any = known.default
    if known.name == "data_dir":
        return '"~/.mlxd"'
    if known.unit == "bytes":
        return f'"{value >> 20}MiB"'
    if known.unit == "seconds":
        return f'"{as_written(known, value)}"'
    if isinstance(value, list):
        return "[]"
    return f'"{value}"' if isinstance(value, str) else as_written(known, value)


MODELS = [
    "# What is said of single models comes last, a table for each; docs/settings.md has every key.",
    '# [models."org/name"]',
    '# aliases = ["small"]',
    "# pin = true",
    '# [models."org/name".profiles.creative]',
    "# temperature = 1.2",
    "",
]


def example_toml() -> str:
    """`deploy/config.example.toml`: every setting with its default, commented out."""
    lines = [
        "# Settings of mlxd. Copy to mlxd.toml in the data folder (~/.mlxd) and take the # from what you change.",
        "# Every line is a default. `mlxd config show` says what is in force and where it comes from.",
        "",
    ]
    for known in fields().values():
        if known.name == "data_dir":  # a file inside the folder cannot move it
            continue
        choices = f" ({', '.join(known.choices)})" if known.choices else ""
        lines += [f"# {known.description}{choices}", f"#{known.name} = {toml_value(known)}", ""]
    return "\n".join(lines + MODELS)


def updated(text: str) -> str:
    """The text with its generated parts as they should be."""
    return _PART.sub(lambda match: f"{match[1]}\n{generate(match[2])}\n{match[3]}", text)


def main() -> None:
    for file in sorted((ROOT / "docs").glob("*.md")):
        before = file.read_text(encoding="utf-8")
        after = updated(before)
        if after != before:
            file.write_text(after, encoding="utf-8")
            print(f"{file.relative_to(ROOT)} is written")
    (ROOT / "deploy" / "config.example.toml").write_text(example_toml(), encoding="utf-8")


if __name__ == "__main__":
    main()
