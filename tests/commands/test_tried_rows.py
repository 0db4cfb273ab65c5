"""Commands end before their first step if a row cannot be judged; the error names the file and the
row.
"""

import dataclasses
import json

import pytest
from tiny_run import tiny_run

from compass_jax.commands.dry_run import run_dry
from compass_jax.commands.look import run_look
from compass_jax.config import FileSource, RewardConfig
from compass_jax.rewards.faults import VerifierError
from compass_jax.training.rl import run_rl

GOOD = [{"prompt": f"Write f, {n}.", "tests": [f"assert f({n}) == {n}"]} for n in range(20)]
BAD = {"prompt": "Write f.", "setup": "import a_package_not_here", "tests": ["assert f(1) == 1"]}
COMMANDS = {
    "data": lambda config: run_look(config.model.vocab_size, config.scored),
    "dry run": lambda config: run_dry(config, "train", None, lambda line: None),
    "train": run_rl,
}


def config_of(tmp_path, rows):
    path = tmp_path / "programs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_run()
    source = FileSource(str(path), verifier="code", answer_field="")
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, sources=(source,)),
        rewards=RewardConfig(sandbox="off"),
        run_dir=str(tmp_path / "run"),
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_row_that_cannot_be_judged_ends_the_command(name, tmp_path):
    config = config_of(tmp_path, [*GOOD[:3], BAD, *GOOD[3:]])
    with pytest.raises(VerifierError, match=r"programs\.jsonl, line 4: setup raises ModuleNotFo"):
        COMMANDS[name](config)


def test_rows_that_can_be_judged_pass(tmp_path, capsys):
    config = config_of(tmp_path, GOOD)
    COMMANDS["data"](config)
    COMMANDS["dry run"](config)
    assert "training: " in capsys.readouterr().out
