"""Functions that the model writes with assertions about them; both are run in a sandbox, and rows say how it went."""

import ast
import asyncio

from worker.lab import sandbox
from worker.lab.dataset import texts
from worker.lab.dataset.form import Dropped, Kit, Made, Plan, Unit, chat

_SYSTEM = """\
You write {language}. Answer with two code blocks and nothing else: first the function, with every import it needs \
from the standard library; then at least three assert statements about it."""


async def plan(kit: Kit) -> Plan:
    """One unit a specification. Raises `Refused` (unsupported) where nothing can be run safely."""
    await asyncio.to_thread(sandbox.require)
    return Plan([Unit(f"line {piece.line}", piece.text) for piece in texts.lines(kit.inputs["specs"])])


async def make(unit: Unit, kit: Kit) -> Made:
    language = kit.inputs["language"]
    answer = (await kit.ask(unit.data, _SYSTEM.format(language=language.capitalize()))).whole()
    blocks = texts.code_blocks(answer)
    if not blocks:
        raise Dropped("the model wrote no code block")
    code, tests, problem = parted(blocks)
    if not problem:
        outcome = await asyncio.to_thread(sandbox.run, f"{code}\n\n{tests}\n")
        problem = outcome.problem
    metadata = {"verified": not problem, "language": language, "tests": tests}
    if problem:
        metadata["problem"] = problem
    said = f"```{language}\n{code.strip()}\n```"
    return Made([chat(("user", unit.data), ("assistant", said), metadata=metadata)])


def parted(blocks: list[str]) -> tuple[str, str, str]:
    """The code, its assertions, and why they cannot be run. Raises `Dropped` where there is nothing to verify."""
    trees: list[ast.Module] = []
    for block in blocks:
        try:
            trees.append(ast.parse(block))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return blocks[0], "", "SyntaxError"
    checks = [node for tree in trees for node in tree.body if isinstance(node, ast.Assert)]
    defined = {
        node.name
        for node in trees[0].body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    if not defined:
        raise Dropped("the first code block defines nothing")
    used = {node.id for check in checks for node in ast.walk(check) if isinstance(node, ast.Name)}
    if not used & defined:
        raise Dropped("the model wrote no assertion about its code")
    first = [node for node in trees[0].body if not isinstance(node, ast.Assert)]
    others = [node for tree in trees[1:] for node in tree.body if node not in checks]
    code = blocks[0] if len(first) == len(trees[0].body) else ast.unparse(ast.Module(first, []))
    setup = [
        ast.unparse(node) for node in others if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign)
    ]
    return code, "\n".join([*setup, *map(ast.unparse, checks)]), ""
