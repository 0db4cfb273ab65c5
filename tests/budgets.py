"""The sizes that the package may have, budgets.toml, and what is measured against them.

    python tests/budgets.py            `make lint`: names each number that is above its budget, and
                                       each of `only_falling` that has fallen and is to be lowered
    python tests/budgets.py --write    writes the measured numbers

A commit that needs more lines than its room has takes some out of that room, or raises the number
and says why in its message. A room is a folder of the package; `top` are the files beside them.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping

from house_rules import PACKAGE, ROOMS, ROOT, _hints, imports, module_name, sources

BUDGETS = ROOT / "tests" / "budgets.toml"
MIDDLE = ("training/loop.py", "training/learner.py", "experience/buffer.py")
MIDDLE += ("experience/collect.py", "model/transformer.py")
# the configuration of a run and the class that it inherits from
RUN_CONFIGS = r"\b(RunConfig|Section)\b"
VAGUE = {"one", "most", "left", "rest", "other", "each"}
Modules = Mapping[str, ast.AST]


def room_lines(texts: Mapping[str, str]) -> dict[str, int]:
    """Returns the lines of each room, from the texts of the package's files by their paths."""
    lines: Counter[str] = Counter()
    for path, text in texts.items():
        lines[path.partition("/")[0] if "/" in path else "top"] += len(text.splitlines())
    return dict(sorted(lines.items()))


def imported_files(modules: Modules) -> dict[str, set[str]]:
    """Returns the modules that each module imports, inside functions too, but not for types alone.

    `from a import b` imports a.b where that is a module, else a.
    """
    imported = {}
    for module, tree in modules.items():
        names = {x.removeprefix("compass_jax.") for x in imports(_at_run_time(tree))}
        found = {x if x in modules else x.rpartition(".")[0] for x in names}
        imported[module] = found & set(modules) - {module, ""}
    return imported


def _at_run_time(tree: ast.AST) -> ast.Module:
    """Returns the tree's import statements, but those under `if TYPE_CHECKING`."""
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = [x for x in ast.walk(tree) if isinstance(x, ast.Import | ast.ImportFrom)]
    return ast.Module([x for x in found if id(x) not in skipped], [])


def file_circles(modules: Modules) -> list[list[str]]:
    """Returns the groups of files that import each other, directly or through other files."""
    return _circles(imported_files(modules))


def room_circles(modules: Modules) -> list[list[str]]:
    """Returns the groups of rooms that import each other at run time."""
    below: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, names in imported_files(modules).items():
        room = module.partition(".")[0]
        if room in below:
            below[room] |= {name.partition(".")[0] for name in names} & set(ROOMS)
    return _circles(below)


def _circles(below: Mapping[str, set[str]]) -> list[list[str]]:
    reached = {name: _reached(name, below) for name in below}
    groups = {frozenset(x for x in reached[name] if name in reached[x]) for name in below}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reached(module: str, below: Mapping[str, set[str]]) -> set[str]:
    seen, queue = {module}, [module]
    while queue:
        new = below[queue.pop()] - seen
        seen |= new
        queue += new
    return seen


def any_hints(modules: Modules) -> int:
    """Returns how often annotations and aliases say Any, or an alias of base/aliases.py for it."""
    aliases = {
        node.target.id
        for node in ast.walk(modules["base.aliases"])
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    loose = aliases | {"Any"}
    return sum(
        isinstance(node, ast.Name) and node.id in loose and isinstance(node.ctx, ast.Load)
        for tree in modules.values()
        for node in ast.walk(tree)
    )


def run_signatures(modules: Modules) -> int:
    """Returns how many functions take RunConfig or the class that it inherits from."""
    functions = [
        node
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sum(
        any(
            re.search(RUN_CONFIGS, ast.unparse(hint))
            for hint in _hints(node)
            if hint != node.returns
        )
        for node in functions
    )


def vague_bindings(modules: Modules) -> float:
    """Returns how many of 1,000 names of variables and parameters are in VAGUE."""
    names = [
        node.id if isinstance(node, ast.Name) else node.arg
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]
    return round(1000 * sum(name in VAGUE for name in names) / max(len(names), 1), 1)


def words_of_docs() -> int:
    """Returns the words of README.md and docs/, without the generated reference."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return sum(len(x.read_text().split()) for x in files if "reference" not in x.parts)


def measured() -> dict[str, dict[str, float]]:
    """Returns the numbers of budgets.toml as they are now."""
    texts = {str(x.relative_to(PACKAGE)): text for x, text in sources("compass_jax").items()}
    modules = {module_name(PACKAGE / path): ast.parse(text) for path, text in texts.items()}
    rooms = room_lines(texts)
    return {
        "rooms": dict(rooms),
        "middle": {path: len(texts[path].splitlines()) for path in MIDDLE},
        "docs": {"words": words_of_docs()},
        "only_falling": {
            "circles_of_files": len(file_circles(modules)),
            "circles_of_rooms": len(room_circles(modules)),
            "any_per_1000_lines": round(1000 * any_hints(modules) / sum(rooms.values()), 1),
            "signatures_with_run_config": run_signatures(modules),
            "vague_names_per_1000": vague_bindings(modules),
        },
    }


def offences(
    now: Mapping[str, Mapping[str, float]], budgets: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Returns a line for each number without a budget, above it, or fallen and not yet lowered."""
    lines = []
    for table, numbers in now.items():
        for name, number in numbers.items():
            budget = budgets.get(table, {}).get(name)
            if budget is None:
                lines.append(f"{table}.{name} = {number}: has no budget; add one, with its reason")
            elif number > budget:
                lines.append(
                    f"{table}.{name} = {number}: the budget is {budget}; take out"
                    f" {round(number - budget, 1)}, or raise it with the reason in the commit"
                )
            elif table == "only_falling" and number < budget:
                lines.append(f"{table}.{name} = {number}: fell below {budget}; lower the budget")
        for name in sorted(set(budgets.get(table, {})) - set(numbers)):
            lines.append(f"{table}.{name}: there is no such room or file any more; take it out")
    return lines


def written(numbers: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the numbers as TOML."""
    head = "# Written by `python tests/budgets.py --write`; what they are: tests/budgets.py\n"
    tables = [
        f"\n[{table}]\n" + "".join(f'"{name}" = {number}\n' for name, number in rows.items())
        for table, rows in numbers.items()
    ]
    return head + "".join(tables)


def main(words: list[str]) -> int:
    now = measured()
    if words == ["--write"]:
        BUDGETS.write_text(written(now))
        return 0
    found = offences(now, tomllib.loads(BUDGETS.read_text()))
    print(*(f"budget: {line}" for line in found), sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
