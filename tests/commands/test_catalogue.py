"""`compass tasks` lists every verifier, task and data set, each with its description."""

import json
import sys

import pytest
from reasoning_gym.factory import DATASETS

from compass_jax.base.errors import UserError
from compass_jax.commands.catalogue import entry_of, shipped, source_of
from compass_jax.commands.cli import main
from compass_jax.config import ConfigError
from compass_jax.config.kinds import kinds
from compass_jax.rewards.tasks.rows import decode_row
from examples.shop import shop


def test_every_verifier_task_and_data_set_is_listed(capsys, monkeypatch):
    """The tasks are listed with and without the packages that have their data."""
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    assert main(["tasks"]) == 0
    output = capsys.readouterr().out
    for name, kind in kinds().items():
        assert f"  {name}: 1 where {kind.about}\n" in output
    assert "  compass_jax.data.human_eval:problems: code; 164 rows\n" in output
    bfcl = [name for name in shipped() if name.startswith("compass_jax.data.bfcl:")]
    assert len(bfcl) == len(shipped()) - 1 == 5
    for name in bfcl:
        words = "tools" if "single" in name else "a conversation of up to 64 turns"
        assert f"  {name}: {words}\n      the data are in the package bfcl_eval" in output
    assert f"reasoning-gym's {len(DATASETS)} data sets" in output
    assert set(output.splitlines()[-1].strip().split(", ")) == set(DATASETS)


def test_an_example_is_a_row_that_the_verifier_reads():
    entry = entry_of(f"{shop.__file__}:easy")
    assert entry.verifier == "a conversation of up to 4 turns"
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
        "from compass_jax.base.errors import UserError\n"
        "from compass_jax.rewards.tasks import Task\n\n"
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
        ("multi_turn", "did you mean 'compass_jax.data.bfcl:multi_turn_"),
        ("human_eval", "did you mean 'compass_jax.data.human_eval:problems'"),
        ("compass_jax.data.human_eval:problem", "did you mean problems"),
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
