"""Two commands at the same time on one directory: one does its work, the other one is refused."""

import time

import pytest
from campaign_files import CONFIG, assert_clear_error, assert_same_tensors, exported_tensors
from commands_aside import Command
from logged import lines

from compass_jax.commands.cli import main

TUNE, TRAIN = ["sft", CONFIG], ["train", CONFIG, "--rl.steps", "2"]
IMPORT = ["import-hf", "hf", "run"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TUNE, TUNE),
        (IMPORT, IMPORT),
        pytest.param(TRAIN, TRAIN, marks=pytest.mark.slow),
        pytest.param(TRAIN, TUNE, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("wait_s", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_one_of_two_commands_does_its_work(first, second, wait_s, files):
    commands = [Command(first, files, "first")]
    time.sleep(wait_s)
    commands.append(Command(second, files, "second"))
    statuses = [command.finish() for command in commands]
    done = [argv[0] for argv, status in zip((first, second), statuses, strict=True) if status == 0]
    assert len(done) == 1, [command.output()[-2000:] for command in commands]
    refused = statuses.index(next(status for status in statuses if status))
    assert_clear_error(statuses[refused], commands[refused].output(), ("run",))
    if done == ["import-hf"]:
        assert main(["export-hf", "run", "out"]) == 0
        assert_same_tensors(exported_tensors(files / "out"), exported_tensors(files / "hf"))
    else:
        rows = lines(files / "run")
        assert [row["step"] for row in rows] == [1, 2]
        assert {row["stage"] for row in rows} == {"sft" if done == ["sft"] else "rl"}
