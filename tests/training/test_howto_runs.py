"""An advantage, a correction, an optimiser and a callback from outside the package, as on the pages
in docs/howto: each trains two steps.
"""

import dataclasses

import pytest
from howto_code import write_code
from logged import lines
from tiny_run import tiny_run
from worded import override

from compass_jax.config import apply
from compass_jax.training.rl import run_rl


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Returns a function that trains two steps of the tiny run with the given settings and returns
    each step's metrics.
    """
    monkeypatch.chdir(tmp_path)

    def run(words):
        config = dataclasses.replace(tiny_run("odd_verifiers:coin"), run_dir=str(tmp_path / "run"))
        run_rl(override(config, ["--rl.steps", "2", "--rl.save-every", "2", *words]))
        metrics = [row["metrics"] for row in lines(tmp_path / "run", "metrics")]
        assert len(metrics) == 2 and min(one["grad_norm"] for one in metrics) > 0
        return metrics

    return run


def test_the_advantage_of_its_page(train, tmp_path):
    file = write_code("advantage.md", "against_best.py", tmp_path)
    words = ["--rl.advantage", f"{file}:AgainstBest", "--rl.advantage.share", "0.25"]
    train([*words, "--rl.zero-variance.rl-zvp", "False"])
    rows = lines(tmp_path / "run", "tokens")
    # 1 - 0.25 and 0 - 0.25; 0 in a group of equal rewards
    advantages = {x for row in rows for x in row["means"]["advantage"]}
    assert advantages - {0} == {0.75, -0.25}


def test_the_correction_of_its_page(train, tmp_path):
    file = write_code("correction.md", "my_correction.py", tmp_path)
    words = ["--rl.correction", f"{file}:RootRatio", "--rl.correction.power", "0.25"]
    metrics = train([*words, "--rollout.dtype", "bfloat16"])
    assert all(0 < abs(one["correction/weight_mean"] - 1) < 0.1 for one in metrics)


def test_the_callback_of_its_page_writes_a_file(train, tmp_path):
    file = write_code("correction.md", "after_step.py", tmp_path)
    metrics = train(["--callbacks", f"{file}:write"])
    rows = [line.split() for line in (tmp_path / "rewards.txt").read_text().splitlines()]
    assert [row[0] for row in rows] == ["1", "2"] and {row[2] for row in rows} == {"4"}
    assert [float(row[1]) for row in rows] == pytest.approx([x["reward/mean"] for x in metrics])


def test_the_hook_of_its_page_ends_a_run_and_keeps_its_state(tmp_path):
    """A run of three steps is continued, and ends three steps after the last rise."""
    file = write_code("hook.md", "stalled.py", tmp_path)
    base = dataclasses.replace(tiny_run("odd_verifiers:coin"), run_dir=str(tmp_path / "run"))
    hook = [{"name": f"{file}:StopWhenStalled", "metric": "grad_norm", "steps": 3}]
    settings = {"rl.hooks": hook, "rl.optim.learning_rate": 0.0, "data.eval_prompts": 0}
    for steps in (3, 40):
        run_rl(apply(base, {**settings, "rl.steps": steps}))
    metrics = [row["metrics"] for row in lines(tmp_path / "run", "metrics")]
    norms = [x["grad_norm"] for x in metrics]
    assert 3 < len(norms) < 40 and norms.index(max(norms)) == len(norms) - 4
    best, since = 0.0, 0
    for step in metrics:  # the state came over the restart after step 3
        best, since = (step["grad_norm"], 0) if step["grad_norm"] > best else (best, since + 1)
        assert step.get("stalled/steps", 0) == since


def test_lion_by_its_import_path(train):
    options = '[["b1", 0.9], ["weight_decay", 0.1]]'
    train(["--rl.optim.name", "optax:lion", "--rl.optim.options", options])
