"""The laws of the source tree: who may import whom, what is pure, how long a file may be.

The imports are read with `ast`, and a fresh process confirms what is said of the parent: the static and the
dynamic view must agree. To add a module, add it to the table; to break a law, argue it here.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shared", "worker", "parent")
MAX_LINES = 500

# Reading order, leaves first. A unit (a module, or a package with all in it) may import units of earlier
# lines and itself; units on one line do not know each other.
READING_ORDER: dict[str, list[list[str]]] = {
    "shared": [
        ["version", "units", "ndjson", "logs", "errors", "files", "family_config", "providers", "encoders"],
        ["lab", "lab_templates"],
        ["wire", "jobs", "asgi", "model_config", "kv_layout", "tensor_headers", "dataset"],
        ["control", "checkpoint", "adapter"],
    ],
    "worker": [
        ["leave", "control", "text", "layers", "unsound"],
        ["cache"],
        ["weights"],
        ["providers"],
        ["embed.sentence", "embed.groups", "embed.texts"],
        ["models", "embed.pooling", "adapters"],
        ["datasets"],
        ["train"],
        ["measure"],
        ["lab"],
        ["embed.forward"],
        ["engine.sequence", "engine.kv_budget", "engine.pace"],
        ["engine.answer_grammar", "engine.budget", "engine.schema"],
        ["engine.scheduler", "engine.curve", "engine.grammar", "engine.processors"],
        ["engine.sampling"],
        ["engine.runner", "engine.recheck"],
        ["engine.engine"],
        ["load"],
        ["context"],
        ["shape", "resolve"],
        ["stream"],
        ["pipeline", "jobs"],
        ["embed.embedder"],
        ["app"],
        ["serve"],
        ["__main__"],
    ],
    "parent": [
        ["values", "state_table", "bodies"],
        ["model_options", "settings_file"],
        ["config", "protocols", "bus", "db"],
        ["library", "live_config"],
        ["workers"],
        ["pool", "jobs"],
        ["inference"],
        ["access", "ports", "instance"],
        ["routes", "admin", "handover"],
        ["openapi"],
        ["app", "restarter", "connections"],
        ["server"],
        ["commands"],
        ["cli"],
        ["__main__"],
    ],
}

# Third-party modules that a unit may import beyond the standard library and msgspec. Units not named: none.
THIRD_PARTY: dict[str, set[str]] = {
    "worker.text": {"tokenizers", "jinja2"},
    "worker.layers": {"mlx"},
    "worker.cache": {"mlx"},
    "worker.weights": {"mlx"},
    "worker.providers": {"mlx", "mlx_lm"},
    "worker.models": {"mlx"},
    "worker.adapters": {"mlx"},
    "worker.embed": {"mlx", "tokenizers"},
    "worker.datasets": {"numpy"},
    "worker.train": {"mlx", "numpy"},
    "worker.measure": {"mlx", "numpy"},
    "worker.lab.scoring": {"mlx", "numpy"},
    "worker.lab.throughput": {"httpx2"},
    "worker.lab.dataset": {"httpx2", "huggingface_hub"},
    "worker.engine": {"mlx", "numpy", "llguidance"},
    "worker.load": {"mlx"},
    "worker.serve": {"uvicorn"},
    "worker.__main__": {"uvloop"},
    "worker.jobs": {"numpy", "tokenizers", "mlx", "huggingface_hub", "httpx2"},
    "parent.settings_file": {"tomlkit"},
    "parent.workers": {"httptools", "psutil"},
    "parent.jobs": {"psutil"},
    "parent.handover": {"psutil"},
    "parent.routes": {"starlette"},
    "parent.app": {"starlette"},
    "parent.connections": {"uvicorn"},
    "parent.server": {"uvicorn", "uvloop"},
    "parent.commands": {"httpx2"},
}

# Law 1: the parent survives because no native model code is ever in it.
NEVER_IN_THE_PARENT = (
    "mlx",
    "mlx_lm",
    "numpy",
    "tokenizers",
    "safetensors",
    "jinja2",
    "llguidance",
    "worker",
)

PURE = [
    "shared.version",
    "shared.units",
    "shared.ndjson",
    "shared.errors",
    "shared.wire",
    "shared.jobs",
    "shared.lab",
    "shared.lab_templates",
    "shared.dataset",
    "shared.control",
    "shared.checkpoint",
    "shared.adapter",
    "shared.family_config",
    "shared.model_config",
    "shared.providers",
    "shared.kv_layout",
    "shared.tensor_headers",
    "worker.text.detokenizer",
    "worker.text.stops",
    "worker.text.holdback",
    "worker.text.reasoning",
    "worker.text.toolcalls",
    "worker.text.messages",
    "worker.text.repairs",
    "worker.text.schemas",
    "worker.text.functions",
    "worker.lab.cards",
    "worker.lab.dataset.texts",
    "worker.lab.dataset.finishing",
    "worker.engine.sequence",
    "worker.engine.scheduler",
    "worker.engine.kv_budget",
    "worker.engine.pace",
    "worker.engine.answer_grammar",
    "worker.engine.schema",
    "worker.engine.budget",
    "worker.resolve",
    "worker.unsound",
    "parent.values",
    "parent.state_table",
    "parent.model_options",
    "parent.config",
    "parent.library.families",
    "parent.library.fit",
    "parent.library.names",
    "parent.workers.states",
    "parent.workers.restarts",
    "parent.workers.watchdog",
    "parent.pool.models",
    "parent.pool.ledger",
    "parent.pool.desk",
    "parent.pool.plan",
    "parent.jobs.states",
    "parent.jobs.kinds",
    "parent.jobs.retry",
    "parent.jobs.quoting",
    "parent.inference.states",
    "parent.inference.quarantine",
    "parent.protocols",
    "parent.commands.clients",
]
IMPURE = {"asyncio", "time", "socket", "threading", "subprocess", "mlx", "datetime", "random", "selectors"}


def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


MODULES = modules()


def imports_of(name: str) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything the module imports, wherever in it; submodules are named in full."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: a relative import"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in MODULES else base), node.lineno


def unit_of(name: str) -> tuple[str, int]:
    """The unit of a module (without its package) and its line in the reading order; ("", -1): the package."""
    package, _, rest = name.partition(".")
    if rest in ("", "engine", "embed"):
        return "", -1
    for line, units in enumerate(READING_ORDER[package]):
        for unit in units:
            if rest == unit or rest.startswith(unit + "."):
                return unit, line
    raise AssertionError(f"{name} is not in READING_ORDER of {Path(__file__).name}: give it a place")


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_up_the_reading_order(name: str) -> None:
    package = name.partition(".")[0]
    unit, line = unit_of(name)
    for imported, at in imports_of(name):
        root = imported.partition(".")[0]
        if root not in PACKAGES:
            continue
        assert root in (package, "shared"), f"{name}:{at} imports {imported}: {package} does not know {root}"
        if root == package != name:
            other, other_line = unit_of(imported)
            assert other == unit or other_line < line, f"{name}:{at} imports {imported}, which comes later"


@pytest.mark.parametrize("name", MODULES)
def test_third_party_modules_are_those_of_the_table(name: str) -> None:
    allowed = {"msgspec"}
    for unit, modules_ in THIRD_PARTY.items():
        if name == unit or name.startswith(unit + "."):
            allowed |= modules_
    for imported, at in imports_of(name):
        root = imported.partition(".")[0]
        if root not in PACKAGES and root not in sys.stdlib_module_names:
            assert root in allowed, f"{name}:{at} imports {imported}, which is not in THIRD_PARTY for it"
        if name.startswith("parent"):
            assert root not in NEVER_IN_THE_PARENT, f"{name}:{at} imports {imported}"


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_has_no_clock_no_loop_and_no_socket(name: str) -> None:
    inside = [module for module in MODULES if module == name or module.startswith(name + ".")]
    assert inside, f"{name} does not exist; PURE is out of date"
    for module in inside:
        for imported, at in imports_of(module):
            assert imported.partition(".")[0] not in IMPURE, f"{module}:{at} imports {imported}"


def test_the_tables_name_only_what_exists() -> None:
    for package, lines in READING_ORDER.items():
        for unit in (unit for line in lines for unit in line):
            full = f"{package}.{unit}"
            assert full in MODULES, f"READING_ORDER names {full}, which does not exist"
    for full in THIRD_PARTY:
        assert full in MODULES, f"THIRD_PARTY names {full}, which does not exist"


def test_there_are_no_import_cycles() -> None:
    edges = {
        name: {imported for imported, _ in imports_of(name) if imported in MODULES} - {name}
        for name in MODULES
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"a cycle: {' -> '.join((*trail[trail.index(name) :], name))}"
        if name not in done:
            for imported in sorted(edges[name]):
                visit(imported, (*trail, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("[pstw]*/**/*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_file_is_one_idea(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES, "split it, or say here why it must be so long"
    if text.strip() and path.name != "__init__.py":
        assert ast.get_docstring(ast.parse(text)), "a file begins by saying what it owns"


@pytest.mark.parametrize(
    "statement",
    ["import parent.app, parent.server, parent.cli", "from parent.commands import serve, chat, doctor"],
)
def test_a_fresh_parent_holds_no_model_code(statement: str) -> None:
    script = f"{statement}; import sys; print(*sorted(sys.modules))"
    child = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    loaded = {name.partition(".")[0] for name in child.stdout.split()}
    assert "parent" in loaded
    assert loaded.isdisjoint(NEVER_IN_THE_PARENT)
