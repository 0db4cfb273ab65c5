"""The step policy of docs/howto/step_policy.md, one class in one file outside the package: two
steps of training, with a stop between them or without; and refusals on the command line.
"""

import dataclasses
from pathlib import Path

import pytest
from howto_code import write_code
from logged import lines
from test_objective_door import refused
from tiny_run import tiny_run

from compass_jax.commands.overrides import override
from compass_jax.config import RunConfig
from compass_jax.config.io import config_from_json, config_to_json
from compass_jax.training.rl import run_rl


@pytest.fixture
def screening(tmp_path):
    """The name of the page's policy, in a file."""
    return f"{write_code('step_policy.md', 'screening.py', tmp_path)}:Screening"


def configured(name: str, directory: Path, steps: int) -> RunConfig:
    config = dataclasses.replace(tiny_run("odd_verifiers:coin"), run_dir=str(directory))
    words = ["--rl.step-policy", name, "--rl.step-policy.rounds", "2", "--rl.steps", str(steps)]
    return override(config, words)


def test_a_step_policy_of_a_users_file_trains_and_resumes(screening, tmp_path):
    config = configured(screening, tmp_path / "whole", 2)
    assert config.rl.step_policy.name == screening and config.rl.policy.rounds == 2
    assert config_from_json(config_to_json(config)) == config
    run_rl(config)
    whole = tmp_path / "whole"
    assert min(row["metrics"]["grad_norm"] for row in lines(whole, "metrics")) > 0
    groups = lines(whole, "rollouts")
    sizes = {len(group["samples"]) for group in groups}
    assert len(groups) == 2 * config.rl.prompts_per_step and config.rl.group_size in sizes
    for group in groups:
        first = {sample["reward"] for sample in group["samples"][:2]}
        assert len(group["samples"]) == (2 if len(first) == 1 else config.rl.group_size)

    for row in lines(whole, "metrics"):
        m, step = row["metrics"], [g for g in groups if g["step"] == row["step"]]
        trained = sum(sample["tokens"] for group in step for sample in group["samples"])
        assert m["waste/tokens_generated"] == trained + m["rollout/dropped_tokens"]
        assert (m["rollout/dropped_groups"] > 0) == (m["rollout/dropped_tokens"] > 0)
    assert sum(row["metrics"]["rollout/dropped_groups"] for row in lines(whole, "metrics")) > 0

    for steps in (1, 2):
        run_rl(configured(screening, tmp_path / "parts", steps))
    assert lines(tmp_path / "parts", "rollouts") == groups
    losses = [[row["metrics"]["loss"] for row in lines(tmp_path / x)] for x in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_a_step_policy_that_cannot_be_used_is_refused_with_status_2(screening, tmp_path, capsys):
    (tmp_path / "half.py").write_text(
        "from dataclasses import dataclass\nfrom compass_jax.config import StepPolicy\n"
        "@dataclass(frozen=True)\nclass Half(StepPolicy):\n    def missing(self, inputs):\n"
        "        return 0\n"
    )
    for words, message in (
        (["april"], "no such step policy; take one of plain, dynamic, partial, or name your own"),
        (["optax:adam"], "is no subclass of compass_jax.config.StepPolicy"),
        ([f"{tmp_path}/half.py:Half"], "has no chosen(inputs); define it"),
        (["partial"], "set rl.partial_prompts, the number of further prompts in flight"),
        ([screening, "--rl.step-policy.first", "1"], "rl.step_policy.first = 1: must be at least"),
        ([screening, "--rl.objective", "dapo"], "rl.zero_variance.dynamic_sampling would have no"),
    ):
        status, text = refused(["--rl.step-policy", *words], capsys)
        assert status == 2 and message in text and "Traceback" not in text, text
