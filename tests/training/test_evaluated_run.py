"""A real tiny RL run that evaluates an extra set at a chosen step. `compass eval` gives the same
evaluation of its checkpoint, and `compass compare` reads both.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from evolve import evolve
from logged import lines
from tiny_run import tiny_run

from compass_jax.commands import cli
from compass_jax.config import ConfigError, EvalSet
from compass_jax.experience.evaluate import Evaluator, evaluate_weights, run_eval
from compass_jax.runs.metric_table import metric_help
from compass_jax.training.rl import run_rl


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = tiny_run("odd_verifiers:coin")
    (source,) = config.data.sources
    eval_set = EvalSet("own", (dataclasses.replace(source, label="mine"),), prompts=3, k=4)
    config = evolve(
        config,
        run_dir=str(tmp_path_factory.mktemp("evaluated") / "rl"),
        data={"eval_sets": (eval_set,)},
        evaluation={"at": (1,)},
    )
    return config, run_rl(config)


@pytest.mark.slow
def test_a_set_is_evaluated_at_the_steps_of_ones_choice_and_at_the_end(run):
    config, result = run
    first, second = (row["metrics"] for row in lines(Path(config.run_dir)))
    assert not [name for name in second if name.startswith("eval/")]
    for name in ("eval/own/avg_at_k", "eval/own/truncated_frac", "eval/heldout/greedy"):
        assert 0 <= first[name] <= 1
    assert all(metric_help(name) for name in first)
    set_result = result["evaluation"].sets["own"]
    assert (set_result.prompts, set_result.k, set_result.overlap) == (
        3,
        4,
        set_result.by["overlap/training"].prompts,
    )
    assert (
        set(set_result.pass_at) == {1, 2, 4}
        and set_result.by["mine"].avg_at_k == set_result.avg_at_k
    )
    assert set_result.pass_at[1] == pytest.approx(set_result.avg_at_k)


@pytest.mark.slow
def test_the_same_weights_have_the_same_answers_in_compass_eval(run, tmp_path, capsys):
    config, result = run
    out = tmp_path / "out"
    summary = run_eval(
        Evaluator(config.policy, config.scored), config.run_dir, str(out), as_json=True
    )
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads((out / "summary.json").read_text()) == summary
    folder = Path(config.run_dir, "evaluation")
    assert (out / "answers.jsonl").read_text() == (folder / "answers.jsonl").read_text()
    saved_summary = json.loads((folder / "summary.json").read_text())
    for name, one in summary["sets"].items():
        assert saved_summary["sets"][name] == one
    assert f"{config.run_dir}: own" in captured.err and "own: " not in captured.out
    assert cli.main(["compare", config.run_dir, str(out), "--json"]) == 0
    sets = json.loads(capsys.readouterr().out)["sets"]
    assert sets["own"]["matched"] == 3 and sets["own"]["avg_at_k"]["p"] == 1
    assert sets["heldout"]["avg_at_k"]["first"] == pytest.approx(result["evaluation"].avg_at_k)


@pytest.mark.slow
def test_there_must_be_something_to_evaluate(run):
    config, _ = run
    data = dataclasses.replace(config.data, eval_prompts=0, eval_sets=())
    with pytest.raises(ConfigError, match=r"eval_prompts = 0 and data\.eval_sets is empty"):
        evaluate_weights(dataclasses.replace(config, data=data), config.run_dir)
