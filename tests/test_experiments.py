"""The experiments: every variant is a valid configuration."""

import dataclasses

import pytest

from benchmarks import (
    alpha,
    alpha_outcome,
    drafts,
    eight_bit,
    experiments,
    inversion,
    objectives,
    rl_runs,
    stages,
    tokens_elsewhere,
    tokens_to_accuracy,
    turns,
    zero_variance_audit,
)
from examples.shop import shop


def audit(name, folder):
    config, _ = zero_variance_audit.base_config(0, folder, smoke=False)
    changed = dataclasses.replace(config, rl=zero_variance_audit.VARIANTS[name][1](config.rl))
    return zero_variance_audit.with_verifiers(changed, name)


def objective(name, folder):
    config = objectives.task_config("decisions", 0, folder, smoke=False)
    config = objectives.with_objective(config, "weights", name, folder)
    assert config.rl.objective == objectives.VARIANTS[name]
    return config


def alpha_value(name, folder):
    task, size, value = alpha_outcome.VARIANTS[name]
    config = alpha_outcome.start_config(task, size, 0, folder, smoke=False)
    config = alpha_outcome.with_alpha(config, "weights", value, folder)
    assert config.rl.objective.alpha == value and config.rl.updates_per_rollout > 1
    assert (config.model.layers, config.model.hidden) == alpha.SIZES[size]
    return config


def stage(name, folder, smoke=False):
    config = stages.base_config(0, smoke)
    rl = stages.VARIANTS[name](config.rl)
    assert bool(rl.stages) == (name in ("stages", "mix"))
    assert rl.zero_variance.curriculum == (name == "labels")
    assert rl.steps == config.rl.steps and all(s.after_steps < rl.steps for s in rl.stages)
    return dataclasses.replace(config, rl=rl)


def turn(name, folder):
    config = turns.variant_config(name, 0, folder, folder / "cold", smoke=False)
    task = shop.__dict__[config.data.sources[0].task.rpartition(":")[2]]
    calls, reward, _ = turns.VARIANTS[name]
    assert {row["difficulty"] for row in task.prompts(0)} == {calls}
    assert (task.verify.discount is None) == (reward == "end")
    return config


VARIANTS = {
    audit: zero_variance_audit.VARIANTS,
    objective: objectives.VARIANTS,
    alpha_value: alpha_outcome.VARIANTS,
    stage: stages.VARIANTS,
    lambda name, folder: stage(name, folder, smoke=True): stages.VARIANTS,
    turn: turns.VARIANTS,
    lambda name, folder: eight_bit.run_config(name, 0, folder, "", smoke=False): eight_bit.VARIANTS,
}


@pytest.mark.parametrize(
    ("configured", "name"), [(make, name) for make, names in VARIANTS.items() for name in names]
)
def test_every_variant_is_a_configuration_that_may_run(configured, name, tmp_path):
    configured(name, tmp_path).validate_for_rl()


ALPHA = "decisions, 2 layers of 64, 0.02"
# For each experiment: the name of its files, its options, and rows of its table in order.
SMOKES = {
    zero_variance_audit: (
        "zero_variance",
        ["--seeds", "0", "--only", "grpo", "filter"],
        ("| grpo | 1 |", "| filter | 1 |"),
    ),
    objectives: (
        "objectives",
        ["--seeds", "0", "--only", "espo", "--tasks", "decisions"],
        ("**decisions**", "| espo | 1 |"),
    ),
    alpha: ("alpha", ["--vocabularies", "512"], tuple(f"| {size} | 512 |" for size in alpha.SIZES)),
    alpha_outcome: (
        "alpha_outcome",
        ["--seeds", "0", "--only", ALPHA],
        ("| decisions | 2 layers of 64 | 0.02 | 1 |",),
    ),
    stages: (
        "stages",
        ["--seeds", "0", "--only", "stages", "shuffled"],
        ("| stages | 1 |", "| shuffled | 1 |"),
    ),
    turns: (
        "turns",
        ["--cold-starts", "OUT/cold"],
        ("| 2 | either | no stages | 1 |", "| 4 | each turn | RL-ZVP and growth | 1 |"),
    ),
    tokens_to_accuracy: (
        "tokens_to_accuracy",
        ["--seeds", "0", "--only", "grpo", "stages", "screening", "permuted"],
        ("| grpo, 4 x 4", "| stages, growth x2", "| screening, 2 of 4", "| permuted, "),
    ),
    tokens_elsewhere: (
        "sums",
        ["sums", "--seeds", "0", "--only", "screening, posterior"],
        ("\n| grpo, 4 x 4", "\n| screening, posterior, 2 of 4, 4 x 4"),
    ),
    inversion: (
        "inversion",
        ["--only", "gold", "scalar", "judge refreshed"],
        tuple(f"\n| {name} |" for name in ("gold", "scalar", "judge refreshed")),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", SMOKES, ids=lambda module: module.__name__)
def test_an_experiment_runs_once(experiment, tmp_path, monkeypatch):
    name, options, rows = SMOKES[experiment]
    options = [x.replace("OUT", str(tmp_path)) for x in options]
    arguments = ["--out", str(tmp_path), "--smoke", *options]
    experiment.main(arguments)
    contents = {file: file.read_bytes() for file in tmp_path.glob(f"{name}.*")}
    table = (tmp_path / f"{name}.md").read_text()
    places = [table.index(row) for row in rows]
    assert places == sorted(places)
    pictures = list(tmp_path.glob(f"{name}*.png"))
    assert pictures and all(file.stat().st_size > 10_000 for file in pictures)
    for module in (rl_runs, inversion, tokens_to_accuracy):
        monkeypatch.setattr(module, "run_rl", lambda *_, **__: pytest.fail("it ran again"))
    experiment.main(arguments)
    for file in (tmp_path / f"{name}.md", tmp_path / f"{name}.jsonl"):
        assert file.read_bytes() == contents[file]


@pytest.mark.slow
def test_the_experiment_on_drafts_runs_once(tmp_path, monkeypatch):
    arguments = ["--out", str(tmp_path), "--smoke", "--seeds", "0", "--only", "lenience 1.65"]
    drafts.main(arguments)
    first, second = experiments.finished(tmp_path / "drafts.jsonl")
    assert (first["variant"], second["variant"]) == ("no drafts", "lenience 1.65")
    assert drafts.later(first, "kept") == 0 < drafts.later(second, "kept")
    assert drafts.later(second, "sampled") < drafts.later(first, "sampled")
    table = (tmp_path / "drafts.md").read_text()
    monkeypatch.setattr(drafts, "run_rl", lambda *_, **__: pytest.fail("it ran again"))
    drafts.main(arguments)
    assert (tmp_path / "drafts.md").read_text() == table
