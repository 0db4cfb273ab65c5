"""The budgets: what is measured is what its name says, and each excess is told with its way out."""

import ast
import tomllib

import budgets
import pytest


def modules_of(**texts):
    return {name.replace("__", "."): ast.parse(text) for name, text in texts.items()}


def test_lines_count_for_their_room():
    texts = {"rl/a.py": "x\ny\n", "rl/b/c.py": "z\n", "__main__.py": "x\n\n"}
    assert budgets.room_lines(texts) == {"rl": 3, "top": 2}


def test_files_that_import_each_other_are_a_circle_also_inside_functions():
    modules = modules_of(
        a="from compass_jax.b import f",
        b="def f():\n    from compass_jax import c",
        c="import compass_jax.a",
        d="from compass_jax.a import g",
    )
    assert budgets.file_circles(modules) == [["a", "b", "c"]]
    modules |= modules_of(c="if TYPE_CHECKING:\n    import compass_jax.a")
    assert budgets.file_circles(modules) == []


def test_rooms_that_import_each_other_through_several_files_are_a_circle():
    modules = modules_of(
        data__rows="from compass_jax.rewards.tasks import Task",
        rewards__tasks="",
        rewards__score="def f():\n    from compass_jax.base.chat import find",
        base__chat="import compass_jax.config.io",
        config__io="",
        library="import compass_jax.data.rows",
    )
    assert budgets.room_circles(modules) == []
    modules |= modules_of(config__io="def f():\n    from compass_jax.data import rows")
    assert budgets.room_circles(modules) == [["base", "config", "data", "rewards"]]
    assert budgets.file_circles(modules) == []


def test_any_counts_through_its_aliases():
    aliases = "from typing import Any, TypeAlias\nTree: TypeAlias = Any\n"
    text = (
        "from compass_jax.base.aliases import Tree\ndef f(x: Tree, y: dict[str, Any]) -> Tree: ..."
    )
    assert budgets.any_hints(modules_of(base__aliases=aliases, a=text)) == 1 + 3


@pytest.mark.parametrize("name", ["RunConfig", "Section"])
def test_a_signature_counts_with_the_run_s_bases(name):
    text = (
        f"def f(x: {name}, y: int): ...\ndef g(x: 'list[{name}]'): ...\ndef h(x: MyRunConfigs): ..."
    )
    assert budgets.run_signatures(modules_of(a=text)) == 2


def test_vague_names_are_a_share_of_all_bound_ones():
    assert budgets.vague_bindings(modules_of(a="def f(one, two):\n    three, rest = two\n")) == 500


def test_what_is_above_new_gone_or_fallen_is_told():
    now = {"rooms": {"rl": 12, "data": 9, "attic": 3}, "only_falling": {"circles": 2}}
    allowed = {"rooms": {"rl": 10, "data": 10, "cellar": 1}, "only_falling": {"circles": 3}}
    above, new, gone, fallen = budgets.offences(now, allowed)
    assert "rooms.rl = 12" in above and "take out 2" in above
    assert "rooms.attic = 3: has no budget" in new
    assert "rooms.cellar" in gone
    assert "fell below 3" in fallen
    assert budgets.offences(now, tomllib.loads(budgets.written(now))) == []
