"""Which word of a command line is CONFIG, and where there is none."""

import pytest

from compass_jax.commands.configless import with_config

WITHOUT = [
    "eval --checkpoint runs/mine",
    "eval --checkpoint=runs/mine --seed 3",
    "eval --checkpoint runs/mine --evaluation.k 8 --rollout.prompt-buckets 8 16",
    "eval --evaluation.k 8 --checkpoint runs/mine --out folder --name value --strict",
    "eval --json --seed=3 --checkpoint runs/mine --rl.optim.learning-rate -1",
    "train --model folder --rl.steps 3",
]
WITH = [
    "eval mine.py --checkpoint runs/mine --evaluation.k 8",
    "eval --checkpoint runs/mine mine.py --evaluation.k 8",
    "eval --strict mine.py --checkpoint runs/mine",
    "eval --evaluation.k=8 mine.py --checkpoint=runs/mine",
    "eval mine.py",
    "eval --checkpoint",  # argparse says that its value is missing
    "eval",
    "train mine.py --rl.steps 3",
    "train mine.py --model folder",  # one of the two is too much, which is told
    "export-hf run out",
    "",
]


@pytest.mark.parametrize("line", WITHOUT)
def test_a_value_after_its_setting_is_no_config(line):
    command, *rest = line.split()
    assert with_config([command, *rest]) == [command, "", *rest]


@pytest.mark.parametrize("line", WITH)
def test_a_config_is_found_wherever_it_stands(line):
    assert with_config(line.split()) == line.split()
