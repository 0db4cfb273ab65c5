"""The house rules: the code follows them, and each checker catches an offence."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib

import pytest
from house_rules import (
    CODE_FOLDERS,
    HEAVY,
    LIGHT,
    PURE,
    ROOMS,
    ROOT,
    circles,
    docstring_offences,
    error_offences,
    imported_rooms,
    layer_offences,
    module_name,
    name_offences,
    opening_offences,
    path_offences,
    purity_offences,
    reserved_offences,
    run_config_offences,
    size_notes,
    sources,
)


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return {module_name(file): ast.parse(text) for file, text in sources("compass_jax").items()}


@pytest.mark.parametrize(
    "check",
    [
        layer_offences,
        docstring_offences,
        error_offences,
        reserved_offences,
        name_offences,
        opening_offences,
    ],
)
def test_every_module(check, modules):
    assert len(modules) > 20
    assert [x for name, tree in modules.items() for x in check(name, tree)] == []


def test_a_name_and_a_docstring_that_say_nothing_are_seen():
    text = "def f(given):\n    found, x = given\n\ndef g():\n    'What it has.'\n"
    tree = ast.parse(text)
    assert len(name_offences("attic", tree)) == 2
    assert opening_offences("attic", tree) == ["attic: line 4: the docstring of g begins with What"]


def test_the_package_is_fourteen_rooms_and_none_imports_one_above_it(modules):
    tops = {name.partition(".")[0] for name in modules}
    assert tops == {*ROOMS, "__init__", "__main__"} and len(ROOMS) == 14
    below = imported_rooms(modules)
    place = {room: i for i, room in enumerate(ROOMS)}
    assert [(a, b) for a in ROOMS for b in below[a] & set(ROOMS) if place[b] > place[a]] == []


def test_no_arrow_between_folders_runs_up(modules):
    assert circles(modules) == []
    back = ast.parse("def f():\n    from compass_jax.commands.cli import main")
    assert circles({**modules, "rollout.attic": back}) != []
    assert ["config", "devices", "rewards"] in circles(
        {**modules, "config.attic": ast.parse("import compass_jax.rewards.score")}
    )


def test_the_picture_of_the_rooms_is_true(modules, monkeypatch):
    folder = ROOT / "docs" / "generate"
    monkeypatch.syspath_prepend(str(folder))
    rows = runpy.run_path(str(folder / "pictures.py"))["ROOMS"]
    row_of = {room: i for i, row in enumerate(rows) for room, _ in row}
    assert set(row_of) == set(ROOMS)
    below = imported_rooms(modules)
    assert [(a, b) for a in ROOMS for b in below[a] & set(ROOMS) if row_of[b] <= row_of[a]] == []


def test_few_functions_take_a_whole_run(modules):
    assert run_config_offences(modules) == []
    taking, method = "def f(x, *y: RunConfig): ...", "async def f(self, x: c.RunConfig): ..."
    for text in (taking, "def f() -> 'list[RunConfig]': ...", f"class A:\n {method}"):
        (offence,) = run_config_offences({"rollout.attic": ast.parse(text)})
        assert re.match(r"rollout\.attic: line \d: f takes or returns a RunConfig", offence)
    assert run_config_offences({"commands.attic": ast.parse(taking)}) == []
    holding = ast.parse("class A:\n run: RunConfig\n def f(x: PolicyConfig): ...")
    assert run_config_offences({"rollout.attic": holding}) == []


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
        "training.step",
    } <= set(pure)
    assert [x for name, tree in pure.items() for x in purity_offences(name, tree)] == []


def test_tests_keep_up_with_the_source():
    lines = {
        folder: sum(len(text.splitlines()) for text in sources(folder).values())
        for folder in ("compass_jax", "tests")
    }
    assert lines["tests"] >= 0.6 * lines["compass_jax"]


def test_a_test_file_has_a_name_of_its_own():
    """pytest imports a test file by its base name, and collects only one of two files with the same
    name.
    """
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not [name for name in set(names) if names.count(name) > 1]


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


def test_types_are_checked_everywhere():
    """`make lint` runs mypy on every function of the package. Exceptions are named line by line or
    module by module, and none of those modules belongs to this project.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    overrides = settings.pop("overrides")
    assert settings["packages"] == ["compass_jax"] and settings["check_untyped_defs"]
    assert "ignore-without-code" in settings["enable_error_code"]
    assert not {"exclude", "ignore_errors", "disable_error_code"} & set(settings)
    assert [set(x) for x in overrides] == [{"module", "ignore_missing_imports"}]
    assert not [name for name in overrides[0]["module"] if name.startswith("compass")]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert lint is not None and "$(BIN)/mypy" in lint[1].split()


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
        ("jax", "jaxlib", "flax"),
        ("config.kinds", "rewards.worker", "rewards.tasks", "data.human_eval", "config"),
    )
    assert result.returncode == 0, result.stderr


def test_the_block_on_imports_works():
    result = run_blocked(("rich",), ("runs.telemetry",))
    assert result.returncode == 1 and "rich" in result.stderr


ROUTE = "from compass_jax.model.moe import route"
MASKED = "def f():\n    from compass_jax.base import masked"
METHOD = 'class A:\n    """x"""\n    def m(self):\n        return 1'
JETSTREAM = "from jetstream.engine import engine_api"
SWITCH = "numpy_dtype_promotion"
PROMOTION = f"with jax.{SWITCH}('x'): pass"
OFFENCES = [
    (layer_offences, "rl.a", ROUTE, "imports compass_jax.model.moe.route, which rl may not"),
    (layer_offences, "rewards.a", MASKED, "imports compass_jax.base.masked, which rewards may not"),
    (layer_offences, "rl.objectives.espo", "from . import shapes", "relative import ..shapes"),
    (layer_offences, "attic", "", "belongs to no room of LAYERS"),
    (purity_offences, "model.moe", "import time", "imports time"),
    (purity_offences, "model.moe", "def f():\n    global x\n    x = 1", "line 2: global x"),
    (purity_offences, "model.moe", "jax.debug.print('x')", "line 1: calls print"),
    (docstring_offences, "a", "def f():\n    return 1", "line 1: f has no docstring"),
    (docstring_offences, "a", METHOD, "line 3: m has no docstring"),
    (error_offences, "a", "class E(ValueError):\n    pass", "E is no CompassError"),
    (reserved_offences, "a", JETSTREAM, "imports jetstream; only rollout/jetstream_api.py may"),
    (
        reserved_offences,
        "a",
        PROMOTION,
        "changes numpy_dtype_promotion; only training/optim.py may",
    ),
]


@pytest.mark.parametrize("check,module,snippet,expected", OFFENCES)
def test_checkers_catch(check, module, snippet, expected):
    assert check(module, ast.parse(snippet)) == [f"{module}: {expected}"]


def test_size_checkers_catch():
    assert size_notes("a", "x = 1\n" * 500) == []
    assert size_notes("a", "x = 1\n" * 501) == ["a: 501 lines"]
    body = "    x = 1\n"
    assert size_notes("a", "def f():\n" + body * 79) == []
    assert size_notes("a", "def f():\n" + body * 80) == ["a:1: f has 81 lines"]
    assert path_offences("a", "x\ny = '/" + "root/x'") == ["a:2: /" + "root/"]


def test_checkers_allow_what_is_right():
    assert (
        layer_offences(
            "rollout.engine", ast.parse("from compass_jax.model.moe import route\nimport jax")
        )
        == []
    )
    assert (
        layer_offences("training.loop", ast.parse("from compass_jax.rewards.score import Scorer"))
        == []
    )
    assert reserved_offences("rollout.jetstream_api", ast.parse("import jetstream")) == []
    assert docstring_offences("a", ast.parse("def _f():\n    return 1")) == []
