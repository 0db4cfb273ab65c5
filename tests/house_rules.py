"""The rules that keep the code readable as it grows: imports between rooms, pure rooms, sizes,
names and docstrings. Each function returns the offences against one rule; test_house_rules calls
them."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "compass_jax"
CODE_FOLDERS = ("compass_jax", "configs", "docs", "examples", "launch", "tests", "benchmarks")

# The folders of the package, from the ground up: a room imports none that comes after it.
ROOMS = ("base", "config", "devices", "model", "rl", "rewards", "data", "weights", "rollout")
ROOMS += ("runs", "experience", "training", "apps", "commands")
# What each room may import, itself included. An entry is a room, or a folder or file in it; the
# longest that fits decides. ANY is for entries that put everything together.
ANY = None
GROUND = {"base", "devices.processes"}  # every room may import these
MODEL = {"base.masked", "base.programs", "config", "devices.sharding", "model"}
SAMPLED = MODEL | {"rollout", "rl", "rewards", "experience", "data"}
LAYERS = {
    "base": {"base"},
    "base.masked": set(),
    "base.programs": set(),
    "config": {"config"},
    "config.chat": {"config"},
    "config.kinds": set(),
    "devices": {"config"},
    "devices.allocator": set(),
    "devices.chips": set(),
    "devices.distributed": {"config"},
    "devices.machine": set(),
    "devices.processes": set(),
    "devices.sharding": {"config"},
    "devices.tpu_flags": set(),
    "devices.tpu_versions": {"config"},
    "model": MODEL,
    "model.families": {"config", "model.families"},
    "rl": {"base.masked", "base.programs", "config", "rl"},
    "rewards": {"config", "rewards"},
    "rewards.penalties": set(),
    "rewards.tasks": {"config", "rewards.tasks"},
    "rewards.verifiers": {"config.chat", "config.kinds", "rewards.verifiers"}
    | {"rewards.verifiers.program_child"},
    "rewards.verifiers.program_child": set(),
    "data": {"config", "data", "rewards.tasks", "rewards.verifiers"},
    "weights": MODEL | {"devices.distributed", "weights"},
    "weights.state": set(),
    "rollout": MODEL | {"rollout"},
    "rollout.jetstream_api": MODEL | {"data", "rollout"},
    "rollout.remote": MODEL | {"devices.distributed", "rollout", "weights"},
    "rollout.serving": {"config", "data", "rollout"},
    "runs": {"config", "runs"},
    "runs.compiled": set(),
    "runs.compiler_clock": set(),
    "runs.signals": set(),
    "runs.trackers": {"config", "runs.trackers"},
    "experience": MODEL | {"rollout", "rl", "rewards", "experience"},
    "experience.episodes": SAMPLED,
    "experience.episodes.play": {"config", "data", "rewards.tasks"},
    "experience.evaluate": SAMPLED | {"devices.distributed", "runs", "weights"},
    "experience.evaluated": MODEL | {"rollout", "rl", "rewards", "experience", "runs"},
    "experience.paired": {"experience", "runs"},
    "experience.scorer": {"config", "data", "devices.distributed", "rewards"},
    "training": MODEL
    | {"devices.chips", "rewards.penalties", "rl", "runs.compiler_clock", "training"},
    "training.building": ANY,
    "training.episodes": ANY,
    "training.evaluations": ANY,
    "training.from_files": MODEL | {"data", "devices.machine", "rl", "training", "weights"},
    "training.hand_over": ANY,
    "training.header": {"config"},
    "training.hooks": MODEL | {"training", "experience", "rl"},
    "training.hooks.callbacks": MODEL | {"devices.distributed", "training"},
    "training.hooks.notices": MODEL | {"rl", "training", "experience", "rewards"},
    "training.hooks.own": {"config", "training", "weights.state"},
    "training.hooks.samples": MODEL | {"data", "experience", "rollout", "runs", "training"},
    "training.hooks.step_metrics": ANY,
    "training.idle_settings": MODEL | {"rl", "training", "experience", "rewards"},
    "training.loop": ANY,
    "training.memory": MODEL | {"devices.machine", "rollout"},
    "training.own_engine": ANY,
    "training.own_judge": ANY,
    "training.parts": ANY,
    "training.presets": {"config", "rl"},
    "training.rl": ANY,
    "training.saved": MODEL | {"data", "experience", "runs", "training", "weights"},
    "training.scalar": ANY,
    "training.session": {"config", "data", "devices.distributed", "devices.tpu_versions"}
    | {"rewards", "runs", "weights"},
    "training.sft": ANY,
    "apps": set(),
    "apps.curate": SAMPLED | {"apps.curate", "runs", "training.from_files", "weights"},
    "apps.pipeline": ANY,
    "apps.plan": ANY,
    "apps.tinker": ANY,
    "commands": ANY,
    "__main__": ANY,
    "__init__": ANY,
}
ENGINE = (
    "engine",
    "engine_api",
    "state",
    "prefill",
    "insert",
    "logprobs",
    "drafts",
    "decode",
    "kv_cache",
    "sampling",
    "sizes",
    "programs",
)
PURE = ("model", "rl", *(f"rollout.{part}" for part in ENGINE), "training.step")
IMPURE_MODULES = {
    "time",
    "datetime",
    "threading",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "random",
    "subprocess",
}
IMPURE_MODULES |= {"os", "io", "pathlib", "shutil", "tempfile"}
LIGHT = PURE
# Rooms whose functions may take or return a RunConfig.
WHOLE_RUN = ("commands", "config", "experience.evaluate", "runs.rundir")
WHOLE_RUN += ("apps.curate.merge_sweep", "apps.pipeline.train_judge", "apps.plan.programs")
WHOLE_RUN += (
    "apps.pipeline.work",
    "apps.plan.search",
    "training.building",
    "training.from_files",
    "training.rl",
)
WHOLE_RUN += ("training.sft",)
HEAVY = (
    "grain",
    "tyro",
    "reasoning_gym",
    "jetstream",
    "tensorflow",
    "torch",
    "transformers",
    "matplotlib",
    "orbax",
)


def room_of(module: str) -> str | None:
    """Returns the entry of LAYERS for a dotted module name inside the package."""
    parts = module.split(".")
    return next(
        (".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in LAYERS),
        None,
    )


def imports(tree: ast.AST) -> set[str]:
    """Returns the dotted names of the imported modules. `from a import b` counts as a.b, which may
    be a module.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def layer_offences(module: str, tree: ast.AST) -> list[str]:
    room = room_of(module)
    if room is None:
        return [f"{module}: belongs to no room of LAYERS"]
    allowed = LAYERS[room]
    offences = []
    for name in sorted(imports(tree)):
        if name.startswith("."):
            offences.append(f"{module}: relative import {name}")
        if not name.startswith("compass_jax.") or allowed is ANY:
            continue
        target = room_of(name.removeprefix("compass_jax."))
        if target in GROUND:
            continue
        if (
            target is None
            or (target not in allowed and target.split(".")[0] not in allowed)
            or LAYERS.get(target) is ANY
        ):
            offences.append(f"{module}: imports {name}, which {room} may not")
    return offences


def imported_rooms(modules: Mapping[str, ast.AST]) -> dict[str, set[str]]:
    """Returns, for each room of the package, which of the others it imports."""
    imported: dict[str, set[str]] = {module.split(".")[0]: set() for module in modules}
    for module, tree in modules.items():
        names = {name.split(".")[1] for name in imports(tree) if name.startswith("compass_jax.")}
        imported[module.split(".")[0]] |= names
    # The package itself re-exports names of its upper layers.
    return {room: names & set(imported) - {room} for room, names in imported.items() if room}


def circles(modules: Mapping[str, ast.AST]) -> list[list[str]]:
    """Returns the groups of rooms that import each other, directly or through other rooms. Without
    such a group, the imports between folders have one direction.
    """
    below = imported_rooms(modules)
    reached = {room: _reached(room, below) for room in below}
    mutual = {frozenset(x for x in reached[room] if room in reached[x]) for room in below}
    return sorted(sorted(rooms) for rooms in mutual if rooms)


def _reached(room: str, below: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [room]
    while left:
        new = below.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


def purity_offences(module: str, tree: ast.AST) -> list[str]:
    """Returns the uses of clocks, files, threads, globals and print."""
    offences = [
        f"{module}: imports {name}"
        for name in sorted(imports(tree))
        if name.split(".")[0] in IMPURE_MODULES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            offences.append(
                f"{module}: line {node.lineno}: {type(node).__name__.lower()}"
                f" {', '.join(node.names)}"
            )
        if isinstance(node, ast.Call):
            name = (
                node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            )
            if name in ("print", "open", "input"):
                offences.append(f"{module}: line {node.lineno}: calls {name}")
    return offences


def size_notes(name: str, text: str) -> list[str]:
    """Returns a line for a file over 500 lines and for each function over 80.

    They are printed and fail nothing: a limit that fails makes people split code by its length.
    """
    notes = [f"{name}: {n} lines"] if (n := len(text.splitlines())) > 500 else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            n = node.end_lineno - node.lineno + 1
            if n > 80:
                notes.append(f"{name}:{node.lineno}: {node.name} has {n} lines")
    return notes


def docstring_offences(module: str, tree: ast.Module) -> list[str]:
    """Returns the public functions, classes and methods of public classes that have no docstring. A
    method needs none if another class of the module that it overrides describes it, and `validate`
    needs none.
    """
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = [
        node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")
    ]
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    described = {"validate"}
    for cls in [node for node in public if isinstance(node, ast.ClassDef)]:
        methods = [x for x in cls.body if isinstance(x, kinds) and not x.name.startswith("_")]
        if any(getattr(base, "id", "") in classes for base in cls.bases):
            methods = [method for method in methods if method.name not in described]
        described |= {method.name for method in methods if ast.get_docstring(method)}
        public += [method for method in methods if method.name != "validate"]
    return [
        f"{module}: line {node.lineno}: {node.name} has no docstring"
        for node in public
        if not ast.get_docstring(node)
    ]


# Participles, adverbs and pronouns do not describe a value.
_NO_NAMES = """found told asked said held kept given made near mine theirs ours here there others
    already still taken heard wanted meant gone come came went begun ended again once never ever
    anyone someone nobody nothing none anything everything something alike apart ahead behind beside
    both either neither same such thus whole unused shown wrote written own owned them they those
    these it its unknown"""
_NO_OPENINGS = """Of What Whatever Who Whose At Nobody Nothing Theirs Its Their As By In On So Where
Which From With Without Is Are Has That Those All Every Each No"""
NO_NAMES, NO_OPENINGS = (frozenset(words.split()) for words in (_NO_NAMES, _NO_OPENINGS))


def name_offences(module: str, tree: ast.AST) -> list[str]:
    """Returns the names (of locals, parameters, fields, functions and classes) that are in
    NO_NAMES.
    """
    bound = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.append((node.id, node.lineno))
        elif isinstance(node, ast.arg):
            bound.append((node.arg, node.lineno))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.append((node.name, node.lineno))
    return [
        f"{module}: line {line}: the name {name} says nothing of what it holds"
        for name, line in bound
        if name.strip("_") in NO_NAMES
    ]


def opening_offences(module: str, tree: ast.AST) -> list[str]:
    """Returns the docstrings of public functions that do not begin with a verb or a noun phrase."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    public = [
        node
        for node in ast.walk(tree)
        if isinstance(node, kinds) and not node.name.startswith("_") and ast.get_docstring(node)
    ]
    return [
        f"{module}: line {node.lineno}: the docstring of {node.name} begins with {first}"
        for node in public
        if (first := (ast.get_docstring(node) or "").split()[0]) in NO_OPENINGS
    ]


def error_offences(module: str, tree: ast.Module) -> list[str]:
    """Returns the public exceptions that do not derive from CompassError: a command would end with
    their traceback.
    """
    offences = []
    for node in tree.body if module != "base.errors" else ():
        bases = [getattr(b, "id", "") for b in node.bases] if isinstance(node, ast.ClassDef) else []
        kinds = [getattr(builtins, name, None) for name in bases]
        custom_bases = [
            kind
            for kind in kinds
            if not (isinstance(kind, type) and issubclass(kind, BaseException))
        ]
        if bases and not custom_bases and not node.name.startswith("_"):
            offences.append(f"{module}: {node.name} is no CompassError")
    return offences


def reserved_offences(module: str, tree: ast.AST) -> list[str]:
    """Returns the uses of names that only one file may use."""
    offences = []
    if module != "rollout.jetstream_api" and any(
        n.split(".")[0] == "jetstream" for n in imports(tree)
    ):
        offences.append(f"{module}: imports jetstream; only rollout/jetstream_api.py may")
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)} | {
        n.split(".")[-1] for n in imports(tree)
    }
    if module != "training.optim" and "numpy_dtype_promotion" in names:
        offences.append(f"{module}: changes numpy_dtype_promotion; only training/optim.py may")
    return offences


def run_config_signatures(module: str, tree: ast.AST) -> list[str]:
    """Returns the functions and methods that name RunConfig in a parameter or their result. Fields
    of classes do not count: a value may hold a whole run.
    """
    return [
        f"{module}: line {node.lineno}: {node.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(_names_run_config(hint) for hint in _hints(node))
    ]


def _hints(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.AST]:
    args = node.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    hints = [arg.annotation for arg in every if arg is not None]
    return [hint for hint in (*hints, node.returns) if hint is not None]


def _names_run_config(hint: ast.AST) -> bool:
    """Returns whether a hint names RunConfig, also as a string or as an attribute of a module
    ("config.RunConfig").
    """
    names = {getattr(x, "attr", getattr(x, "id", getattr(x, "value", ""))) for x in ast.walk(hint)}
    return any(isinstance(x, str) and re.search(r"\bRunConfig\b", x) for x in names)


def run_config_offences(modules: Mapping[str, ast.AST]) -> list[str]:
    """Returns the signatures that name RunConfig in a room that needs only a part of it."""
    return [
        f"{text} takes or returns a RunConfig; take the section or part that it reads"
        for name, tree in modules.items()
        if not any(name == room or name.startswith(room + ".") for room in WHOLE_RUN)
        for text in run_config_signatures(name, tree)
    ]


def path_offences(name: str, text: str) -> list[str]:
    """Returns the lines with paths of a particular machine."""
    machine = ["/" + folder + "/" for folder in ("work", "root")]
    return [
        f"{name}:{i}: {path}"
        for i, line in enumerate(text.splitlines(), 1)
        for path in machine
        if path in line
    ]


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def sources(*folders: str) -> dict[Path, str]:
    return {
        file: file.read_text()
        for folder in folders
        for file in sorted((ROOT / folder).rglob("*.py"))
        if "__pycache__" not in file.parts
    }


if __name__ == "__main__":  # called by `make lint`
    for file, text in sources(*CODE_FOLDERS).items():
        for note in size_notes(str(file.relative_to(ROOT)), text):
            print("size:", note)
