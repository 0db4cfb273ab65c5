"""The rules that keep the code readable as it grows: who imports whom, pure rooms, sizes. Each
checker is shown to catch an offence.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "compass_jax"
CODE_FOLDERS = ("compass_jax", "configs", "launch", "tests", "benchmarks")

# Room -> the rooms it may import, itself included. A room is a folder of the package or one of its
# top-level files; the longest entry that fits a file decides. ANY: the rooms that put everything
# together.
ANY = None
BASE = {"records", "config", "masked", "untrusted"}
MODEL = BASE | {"sharding", "model"}
RUN = {"config", "config_io", "untrusted", "rundir", "telemetry", "board", "logfile", "report"}
LAYERS = {
    "records": set(),
    "config": {"config", "untrusted"},
    "masked": set(),
    "chips": set(),
    "tpu_versions": {"config"},
    "untrusted": set(),
    "plan": ANY,
    "config_io": {"config", "untrusted"},
    "distributed": {"config"},
    "families": {"config", "families"},
    "sharding": BASE,
    "model": MODEL,
    "rollout": MODEL | {"rollout"},
    "rollout.jetstream_api": MODEL | {"rollout", "data"},
    "experience": MODEL | {"rollout", "rl", "rewards", "experience"},
    "rl": BASE | {"rl"},
    "tasks": {"config", "tasks"},
    "rewards": {"records", "config", "untrusted", "tasks", "rewards"},
    "rewards.penalties": set(),
    "data": {"records", "config", "untrusted", "tasks", "data"},
    "weights": MODEL | {"families", "weights", "config_io", "distributed"},
    "train": MODEL | {"chips", "rl", "train", "rewards.penalties"},
    "train.session": (
        MODEL
        | {"train", "data", "distributed", "config_io", "rundir", "rewards", "weights"}
        | {"tpu_versions"}
    ),
    "train.loop": ANY,
    "train.sft": ANY,
    "telemetry": {"config", "untrusted", "board", "logfile"},
    "board": set(),
    "errors": {"config", "logfile"},
    "signals": set(),
    "command_line": set(),
    "logfile": {"untrusted"},
    "rundir": {"config", "config_io", "untrusted"},
    "report": RUN,
    "check": {"config", "families", "rundir", "data", "weights"},
    "evaluate": ANY,
    "offline_filter": ANY,
    "calibrate": ANY,
    "demo": ANY,
    "serve": ANY,
    "serving": {"config", "untrusted", "data", "serving"},
    "openai_requests": {"records", "config", "untrusted", "data", "serving"},
    "openai_answers": {"data", "rollout", "serving", "openai_requests"},
    "openai_api": ANY,
    "cli": ANY,
    "__main__": ANY,
    "__init__": set(),
}
ENGINE = ("engine", "state", "prefill", "insert", "decode", "kv_cache", "sampling")
PURE = ("model", "rl", *(f"rollout.{part}" for part in ENGINE), "train.step")
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
    """The entry of LAYERS for a dotted module name inside the package."""
    parts = module.split(".")
    return next(
        (".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in LAYERS),
        None,
    )


def imports(tree: ast.AST) -> set[str]:
    """Dotted names of the modules imported; `from a import b` counts as a.b, which may be a
    module.
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
    found = []
    for name in sorted(imports(tree)):
        if name.startswith("."):
            found.append(f"{module}: relative import {name}")
        if not name.startswith("compass_jax.") or allowed is ANY:
            continue
        target = room_of(name.removeprefix("compass_jax."))
        if (
            target is None
            or (target not in allowed and target.split(".")[0] not in allowed)
            or LAYERS.get(target) is ANY
        ):
            found.append(f"{module}: imports {name}, which {room} may not")
    return found


def purity_offences(module: str, tree: ast.AST) -> list[str]:
    """Clock, file, thread, global, print."""
    found = [
        f"{module}: imports {name}"
        for name in sorted(imports(tree))
        if name.split(".")[0] in IMPURE_MODULES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            found.append(
                f"{module}: line {node.lineno}: {type(node).__name__.lower()}"
                f" {', '.join(node.names)}"
            )
        if isinstance(node, ast.Call):
            name = (
                node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            )
            if name in ("print", "open", "input"):
                found.append(f"{module}: line {node.lineno}: calls {name}")
    return found


def size_offences(name: str, text: str) -> list[str]:
    found = [f"{name}: {n} lines, 400 are allowed"] if (n := len(text.splitlines())) > 400 else []
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (n := node.end_lineno - node.lineno + 1) > 60
        ):
            found.append(f"{name}:{node.lineno}: {node.name} has {n} lines, 60 are allowed")
    return found


def field_offences(tree: ast.AST) -> list[str]:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {c.name: sum(isinstance(x, ast.AnnAssign) for x in c.body) for c in classes}
    return [f"{name} has {n} fields, 20 are allowed" for name, n in fields.items() if n > 20]


def docstring_offences(module: str, tree: ast.Module) -> list[str]:
    """Public functions and classes, and public methods of public classes. `validate` is described
    once, for all of config.py.
    """
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = [
        node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")
    ]
    for cls in [node for node in public if isinstance(node, ast.ClassDef)]:
        public += [
            node
            for node in cls.body
            if isinstance(node, kinds) and not node.name.startswith("_") and node.name != "validate"
        ]
    return [
        f"{module}: line {node.lineno}: {node.name} has no docstring"
        for node in public
        if not ast.get_docstring(node)
    ]


def reserved_offences(module: str, tree: ast.AST) -> list[str]:
    """Names that one file alone may use."""
    found = []
    if module != "rollout.jetstream_api" and any(
        n.split(".")[0] == "jetstream" for n in imports(tree)
    ):
        found.append(f"{module}: imports jetstream; only rollout/jetstream_api.py may")
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)} | {
        n.split(".")[-1] for n in imports(tree)
    }
    if module != "train.optim" and "numpy_dtype_promotion" in names:
        found.append(f"{module}: changes numpy_dtype_promotion; only train/optim.py may")
    return found


def path_offences(name: str, text: str) -> list[str]:
    """Paths of somebody's machine."""
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


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return {module_name(file): ast.parse(text) for file, text in sources("compass_jax").items()}


@pytest.mark.parametrize("check", [layer_offences, docstring_offences, reserved_offences])
def test_every_module(check, modules):
    assert len(modules) > 20
    assert [x for name, tree in modules.items() for x in check(name, tree)] == []


def test_pure_rooms(modules):
    pure = {
        name: tree
        for name, tree in modules.items()
        if any(name == p or name.startswith(p + ".") for p in PURE)
    }
    assert {
        "model.transformer",
        "rl.objectives.espo",
        "rollout.engine",
        "rollout.sampling",
        "train.step",
    } <= set(pure)
    assert [x for name, tree in pure.items() for x in purity_offences(name, tree)] == []


# Files and functions that were over their budget when lines of 100 columns came. Each has to be
# rebuilt smaller; nothing may be added.
STILL_TOO_LARGE = {
    "benchmarks/objectives.py task_config",
    "benchmarks/same_metrics.py variants",
    "benchmarks/server_load.py",
    "benchmarks/server_load.py main",
    "compass_jax/plan/memory.py _of_training",
    "configs/tiny_reasoning_cpu.py tiny_reasoning_cpu",
    "tests/rl/test_objectives.py",
    "tests/test_house_rules.py",
    "tests/test_openai_api.py",
    "tests/test_router_replay.py test_a_toy_run_end_to_end_and_again",
}


def test_sizes(modules):
    found = [
        offence
        for file, text in sources(*CODE_FOLDERS).items()
        for offence in size_offences(str(file.relative_to(ROOT)), text)
    ]
    names = {re.sub(r"(:\d+: (\w+) has|:) .*", r" \2", x).strip() for x in found}
    assert sorted(names - STILL_TOO_LARGE) == []
    assert sorted(STILL_TOO_LARGE - names) == []  # small by now: remove it from the list
    settings = {name: tree for name, tree in modules.items() if name.split(".")[0] == "config"}
    assert len(settings) > 3
    assert [x for tree in settings.values() for x in field_offences(tree)] == []


def test_tests_keep_up_with_the_source():
    lines = {
        folder: sum(len(text.splitlines()) for text in sources(folder).values())
        for folder in ("compass_jax", "tests")
    }
    assert lines["tests"] >= 0.6 * lines["compass_jax"]


def test_no_machine_paths():
    files = [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.toml"),
        *ROOT.glob("*.txt"),
        ROOT / "Makefile",
        ROOT / ".ci" / "run",
    ]
    texts = {file: file.read_text() for file in files} | sources(*CODE_FOLDERS)
    assert [
        x for file, text in texts.items() for x in path_offences(str(file.relative_to(ROOT)), text)
    ] == []


def run_blocked(blocked: tuple[str, ...], modules: tuple[str, ...]) -> subprocess.CompletedProcess:
    """Imports `modules` in a fresh process in which `blocked` cannot be imported."""
    code = (
        f"import sys, importlib\nfor n in {blocked!r}: sys.modules[n] = None\nfor m in {modules!r}:"
        " importlib.import_module('compass_jax.' + m)"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_the_core_imports_without_what_it_does_not_need(modules):
    light = tuple(
        name
        for name in modules
        if name and any(name == p or name.startswith(p + ".") for p in LIGHT)
    )
    result = run_blocked(HEAVY, light)
    assert result.returncode == 0, result.stderr


def test_a_reward_worker_imports_no_jax():
    result = run_blocked(
        ("jax", "jaxlib", "flax"), ("rewards.verifiers", "rewards.worker", "tasks", "config")
    )
    assert result.returncode == 0, result.stderr


def test_the_block_on_imports_works():
    result = run_blocked(("rich",), ("telemetry",))
    assert result.returncode == 1 and "rich" in result.stderr


OFFENCES = [
    (
        layer_offences,
        "rl.objectives.espo",
        "from compass_jax.model.moe import route",
        "imports compass_jax.model.moe.route, which rl may not",
    ),
    (
        layer_offences,
        "model.moe",
        "import compass_jax.rollout.engine",
        "imports compass_jax.rollout.engine, which model may not",
    ),
    (
        layer_offences,
        "rewards.score",
        "def f():\n    from compass_jax import masked",
        "imports compass_jax.masked, which rewards may not",
    ),
    (
        layer_offences,
        "train.step",
        "from compass_jax.train.loop import run_rl",
        "imports compass_jax.train.loop.run_rl, which train may not",
    ),
    (
        layer_offences,
        "telemetry",
        "from compass_jax.rundir import RunDir",
        "imports compass_jax.rundir.RunDir, which telemetry may not",
    ),
    (layer_offences, "rl.objectives.espo", "from . import shapes", "relative import ..shapes"),
    (layer_offences, "attic", "", "belongs to no room of LAYERS"),
    (purity_offences, "model.moe", "import time", "imports time"),
    (purity_offences, "model.moe", "from threading import Lock", "imports threading.Lock"),
    (purity_offences, "model.moe", "def f():\n    global x\n    x = 1", "line 2: global x"),
    (purity_offences, "model.moe", "print(1)", "line 1: calls print"),
    (purity_offences, "model.moe", "jax.debug.print('x')", "line 1: calls print"),
    (purity_offences, "model.moe", "text = open('x').read()", "line 1: calls open"),
    (docstring_offences, "a", "def f():\n    return 1", "line 1: f has no docstring"),
    (
        docstring_offences,
        "a",
        'class A:\n    """x"""\n    def m(self):\n        return 1',
        "line 3: m has no docstring",
    ),
    (
        reserved_offences,
        "rollout.engine",
        "from jetstream.engine import engine_api",
        "imports jetstream; only rollout/jetstream_api.py may",
    ),
    (
        reserved_offences,
        "train.step",
        "with jax.numpy_dtype_promotion('x'): pass",
        "changes numpy_dtype_promotion; only train/optim.py may",
    ),
]


@pytest.mark.parametrize("check,module,snippet,expected", OFFENCES)
def test_checkers_catch(check, module, snippet, expected):
    assert check(module, ast.parse(snippet)) == [f"{module}: {expected}"]


def test_size_checkers_catch():
    assert size_offences("a", "x = 1\n" * 400) == [] and size_offences("a", "x = 1\n" * 401) == [
        "a: 401 lines, 400 are allowed"
    ]
    body = "    x = 1\n"
    assert size_offences("a", "def f():\n" + body * 59) == []
    assert size_offences("a", "def f():\n" + body * 60) == ["a:1: f has 61 lines, 60 are allowed"]
    fields = "class A:\n" + "".join(f"    x{i}: int = 0\n" for i in range(21))
    assert field_offences(ast.parse(fields)) == ["A has 21 fields, 20 are allowed"]
    assert path_offences("a", "x\ny = '/" + "root/x'") == ["a:2: /" + "root/"]


def test_checkers_allow_what_is_right():
    assert (
        layer_offences(
            "rollout.engine", ast.parse("from compass_jax.model.moe import route\nimport jax")
        )
        == []
    )
    assert (
        layer_offences("train.loop", ast.parse("from compass_jax.rewards.score import Scorer"))
        == []
    )
    assert reserved_offences("rollout.jetstream_api", ast.parse("import jetstream")) == []
    assert docstring_offences("a", ast.parse("def _f():\n    return 1")) == []
