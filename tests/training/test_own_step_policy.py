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
from worded import override

from compass_jax.config import RunConfig
from compass_jax.config.io import config_from_json, config_to_json
from compass_jax.training.rl import run_rl


@pytest.fixture
def balanced(tmp_path):
    """Returns the name of the page's policy, which is written to a file."""
    return f"{write_code('step_policy.md', 'balanced.py', tmp_path)}:Balanced"


def configured(name: str, directory: Path, steps: int) -> RunConfig:
    config = dataclasses.replace(tiny_run("odd_verifiers:coin"), run_dir=str(directory))
    words = ["--rl.step-policy", name, "--rl.step-policy.surplus", "3", "--rl.steps", str(steps)]
    return override(config, words)


def distance(rewards):
    return abs(sum(rewards) / len(rewards) - 0.5)


def test_a_step_policy_of_a_users_file_trains_and_resumes(balanced, tmp_path):
    config = configured(balanced, tmp_path / "whole", 2)
    assert config.rl.step_policy.name == balanced and config.rl.policy.surplus == 3
    assert config_from_json(config_to_json(config)) == config
    run_rl(config)
    directory, prompts = tmp_path / "whole", config.rl.prompts_per_step
    assert min(row["metrics"]["grad_norm"] for row in lines(directory, "metrics")) > 0
    groups = lines(directory, "rollouts")
    assert len(groups) == 2 * prompts
    for row in lines(directory, "metrics"):
        m, step = row["metrics"], [g for g in groups if g["step"] == row["step"]]
        trained = sum(sample["tokens"] for group in step for sample in group["samples"])
        assert m["waste/tokens_generated"] == trained + m["rollout/dropped_tokens"]
        assert m["rollout/dropped_groups"] == 2 * prompts and m["rollout/dropped_tokens"] > 0
        distances = [distance([sample["reward"] for sample in g["samples"]]) for g in step]
        # at least four of twelve groups vary
        assert distances == sorted(distances) and max(distances) < 0.5
        assert m["balanced/distance"] == pytest.approx(sum(distances) / prompts)

    for steps in (1, 2):
        run_rl(configured(balanced, tmp_path / "parts", steps))
    assert lines(tmp_path / "parts", "rollouts") == groups
    losses = [[row["metrics"]["loss"] for row in lines(tmp_path / x)] for x in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_a_step_policy_that_cannot_be_used_is_refused_with_status_2(balanced, tmp_path, capsys):
    (tmp_path / "half.py").write_text(
        "from dataclasses import dataclass\nfrom compass_jax.config import StepPolicy\n"
        "@dataclass(frozen=True)\nclass Half(StepPolicy):\n    def missing(self, inputs):\n"
        "        return 0\n"
    )
    for words, message in (
        (["april"], "no such step policy; take one of plain, dynamic, partial, screening, or name"),
        (["optax:adam"], "is no subclass of compass_jax.config.StepPolicy"),
        ([f"{tmp_path}/half.py:Half"], "has no chosen(inputs); define it"),
        (["screening", "--rl.step-policy.n0", "1"], "rl.step_policy.n0 = 1: must be at least 2"),
        (["screening", "--rl.step-policy.n0", "4"], "rl.group_size = 4 leaves no samples to"),
        (["partial"], "set rl.partial_prompts, the number of further prompts in flight"),
        ([balanced, "--rl.step-policy.surplus", "1"], "rl.step_policy.surplus = 1: must be at"),
        ([balanced, "--rl.objective", "dapo"], "rl.zero_variance.dynamic_sampling would have no"),
    ):
        status, text = refused(["--rl.step-policy", *words], capsys)
        assert status == 2 and message in text and "Traceback" not in text, text
