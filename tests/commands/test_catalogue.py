"""`compass tasks` lists every verifier, task and data set, each with its description."""

import json

import pytest
from reasoning_gym.factory import DATASETS

from compass_jax.commands import catalogue
from compass_jax.commands.catalogue import entry_of, shipped, source_of
from compass_jax.commands.cli import main
from compass_jax.config import ConfigError
from compass_jax.errors import UserError
from compass_jax.gym import shop
from compass_jax.tasks import Task
from compass_jax.tasks.rows import decode_row
from compass_jax.verifiers.base import kinds


def test_every_verifier_task_and_data_set_is_listed(capsys, monkeypatch):
    """The tasks are those that the modules define; only two of them are read, which is faster."""
    few = {name: task for name, task in shipped().items() if name.endswith(("short_1", "short_8"))}
    assert set(few) == {f"compass_jax.gym.shop:short_{n}" for n in (1, 8)}
    shop_tasks = {f"compass_jax.gym.shop:{n}" for n, x in vars(shop).items() if isinstance(x, Task)}
    assert shop_tasks < set(shipped()) and "compass_jax.data.human_eval:problems" in shipped()
    monkeypatch.setattr(catalogue, "shipped", lambda: few)
    assert main(["tasks"]) == 0
    output = capsys.readouterr().out
    for name, kind in kinds().items():
        assert f"  {name}: 1 where {kind.about}\n" in output
    rows = len(list(shop.short_8.prompts(0)))
    about = f"shop:short_8: a conversation of up to 10 turns; {rows:,} rows; en, id, pt\n"
    assert about in output and f"reasoning-gym's {len(DATASETS)} data sets" in output
    assert set(output.splitlines()[-1].strip().split(", ")) == set(DATASETS)


def test_an_example_is_a_row_that_the_verifier_reads():
    entry = entry_of("compass_jax.gym.shop:easy")
    assert entry.languages == ("en", "id", "pt") and entry.rows == len(list(shop.easy.prompts(0)))
    assert "prices" in decode_row(entry.row)["shop"]
    row = decode_row(entry_of("chain_sum", seed=3).row)
    assert {"question", "answer", "metadata"} <= set(row)
    assert json.loads(entry_of("regex").row) == dict(kinds()["regex"].example.row)


def test_one_name_is_shown_whole(capsys):
    assert main(["tasks", "tools"]) == 0
    output = capsys.readouterr().out
    example = kinds()["tools"].example
    assert f"right: {example.right}\nwrong: {example.wrong}\n" in output


def test_what_cannot_be_had_is_said_in_its_place(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text(
        "from compass_jax.errors import UserError\n"
        "from compass_jax.tasks import Task\n\n"
        "def prompts(seed):\n"
        "    raise UserError('it is in a package: pip install it')\n\n"
        "task = Task(prompts, {'math': 1.0, 'format': 0.2})\n"
    )
    entry = entry_of(f"{tmp_path}/lacking.py:task")
    assert entry.lacks == "it is in a package: pip install it" and entry.rows is None
    assert entry.verifier == "math + 0.2 format"
    assert "refuses the options" in entry_of("composite").lacks


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("maths", "did you mean 'math'"),
        ("chain_sums", "did you mean 'chain_sum'"),
        ("shop", "did you mean 'compass_jax.gym.shop:"),
        ("human_eval", "did you mean 'compass_jax.data.human_eval:problems'"),
        ("compass_jax.gym.shop:tusk", "did you mean task"),
        ("qqqqqq", "compass tasks lists all"),
        ("judge", "a run asks it"),
    ],
)
def test_a_name_that_means_nothing_names_the_nearest(name, hint, capsys):
    with pytest.raises(ConfigError) as exc_info:
        source_of(name)
    assert hint in str(exc_info.value)
    assert main(["try", name, "--response", "x"]) == UserError.exit_status
    assert capsys.readouterr().err.count("\n") == 1
