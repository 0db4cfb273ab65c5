"""A run as a Python object: its files, its checkpoints, and its steps."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from evolve import evolve
from logged import lines
from served import saved
from tiny_run import tiny_run

import compass_jax
from compass_jax.commands.library import Steps
from compass_jax.config import ConfigError
from compass_jax.config.io import config_to_json, read_config
from compass_jax.data.files import DataError
from compass_jax.runs.report import ReportError
from compass_jax.training.rl import rl_steps, run_rl
from compass_jax.weights import checkpoint
from compass_jax.weights.start import restore_params

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "python.md"
STARTED = """
import matplotlib
matplotlib.use("Agg")
import compass_jax
whole = compass_jax.train
def train(*arguments, settings):
    return whole(*arguments, settings=settings | SMALL)
compass_jax.train = train
"""
SMALL = {
    "rl.steps": 2,
    "rl.prompts_per_step": 2,
    "rl.group_size": 3,
    "rl.updates_per_rollout": 1,
    "rollout.slots": 8,
    "rollout.max_new_tokens": 8,
    "data.eval_prompts": 0,
}


def steps_of(config):
    """Returns the steps of a configuration, as `compass_jax.steps` does of its arguments."""
    return Steps(config.directory, rl_steps(config))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a finished run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with steps_of(evolve(tiny_run(), run_dir=str(folder))) as steps:
        numbers = [step.number for step in steps]
    assert numbers == [1, 2]
    return compass_jax.Run(folder)


def test_the_metrics_are_columns_of_equal_length(trained):
    rows = lines(trained.directory)
    columns = trained.metrics
    assert next(iter(columns)) == "step" and columns["step"].tolist() == [1, 2]
    assert set(columns) == {"step"}.union(*(row["metrics"] for row in rows))
    for name in ("reward/mean", "time/step_s"):
        assert columns[name].tolist() == [row["metrics"][name] for row in rows]
    assert trained["reward/mean"] == rows[-1]["metrics"]["reward/mean"]
    assert trained["steps"] == 2 and "evaluation" in trained
    assert len(trained) == len(list(trained)) and dict(trained)["steps"] == 2
    with pytest.raises(KeyError):
        trained["no/such"]


def folder_with(tmp_path, rows):
    (tmp_path / "config.json").write_text(config_to_json(tiny_run()))
    text = "".join(
        json.dumps({"stage": "rl", "step": step, "metrics": metrics}) + "\n"
        for step, metrics in rows
    )
    (tmp_path / "metrics.jsonl").write_text(text)
    return compass_jax.Run(tmp_path)


def test_a_step_without_a_metric_has_nan_and_a_repeated_step_its_last_value(tmp_path):
    rows = [(1, {"a": 1.0}), (2, {"a": 2.0, "b": 5.0}), (2, {"a": 3.0, "b": None}), (3, {"a": 4.0})]
    run = folder_with(tmp_path, rows)
    assert run.metrics["step"].tolist() == [1, 2, 3]
    assert run.metrics["a"].tolist() == [1, 3, 4]
    assert np.isnan(run.metrics["b"]).all()
    assert dict(run) == {"a": 4.0, "steps": 3}


def test_a_run_before_its_first_step_is_empty(tmp_path):
    run = folder_with(tmp_path, [])
    assert run.metrics["step"].tolist() == [] and dict(run) == {"steps": 0}
    with pytest.raises(ReportError, match=r"rollouts\.jsonl does not exist"):
        run.samples()
    with pytest.raises(ConfigError, match="is not a run directory"):
        compass_jax.Run(tmp_path / "nothing")


def test_the_samples_are_those_of_a_step(trained):
    groups = trained.samples(1)
    logged = [row for row in lines(trained.directory, "rollouts") if row["step"] == 1]
    assert [group["prompt"] for group in groups] == [row["prompt"] for row in logged]
    assert all(len(group["samples"]) == 4 for group in groups)
    assert {group["step"] for group in trained.samples()} == {2}
    with pytest.raises(ReportError, match="step 9 has no samples; logged are 1 to 2"):
        trained.samples(9)


def test_the_newest_checkpoint_generates_what_transformers_generates(trained, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = trained.export(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    for question in ("2 + 3 =", "What is seven plus eight? " * 3):  # the second needs a new bucket
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        ids = torch.tensor([prompt["input_ids"]])
        answer = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
        expected = tokenizer.decode(answer, skip_special_tokens=True)
        assert trained.generate(question) == trained.generate(chat) == expected
    assert ids.shape[1] > tiny_run().rollout.prompt_buckets[-1]
    drawn = [trained.generate("2 + 3 =", temperature=2.0, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_cannot_be_answered_is_refused(trained):
    with pytest.raises(ConfigError, match="at most 112 fit into the model's context of 128"):
        trained.generate("2 + 3 = " * 30)
    with pytest.raises(DataError, match=r"prompt: .*text or a list of chat messages"):
        trained.generate(7)
    with pytest.raises(DataError, match="nothing is asked"):
        trained.generate(" ")


def test_the_parameters_follow_the_newest_checkpoint(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained.directory, folder)
    run = compass_jax.Run(folder)
    first = run.params
    assert run.params is first
    answered = run.generate("2 + 3 =")
    assert answered == trained.generate("2 + 3 =")
    with steps_of(evolve(tiny_run(), run_dir=str(folder), rl={"steps": 3})) as steps:
        (step,) = steps
    assert step.number == run["steps"] == 3
    assert run.params is not first
    np.testing.assert_array_equal(run.params["embed"], restore_params(folder)[0]["embed"])
    assert np.any(run.params["embed"] != first["embed"])
    assert run.generate("2 + 3 =") == compass_jax.Run(folder).generate("2 + 3 =")


def test_the_report_is_written_again(trained, tmp_path):
    assert (trained.directory / "report.html").is_file()  # at the end of the training
    assert trained.report(tmp_path / "page.html") == tmp_path / "page.html"
    assert trained.report() == trained.directory / "report.html"


def unsaved(folder):
    """Returns a run that saves nothing before its end."""
    return evolve(tiny_run(), run_dir=str(folder), rl={"steps": 3, "save_every": 0})


def test_a_loop_that_is_left_saves_and_the_run_continues_exactly(tmp_path):
    run_rl(unsaved(tmp_path / "whole"))
    config = unsaved(tmp_path / "left")
    kept = steps_of(config)  # a name keeps the object, and the loop ends it nevertheless
    for step in kept:
        assert step.metrics["reward/mean"] == kept.run["reward/mean"]
        break
    assert checkpoint.latest(config.directory) == 1
    with pytest.raises(ZeroDivisionError):
        for step in steps_of(config):
            assert step.number == 2
            raise ZeroDivisionError(step)
    assert checkpoint.latest(config.directory) == 2
    assert not (tmp_path / "left" / "report.html").exists()
    numbers = [step.number for step in steps_of(config)]
    assert numbers == [3] and (tmp_path / "left" / "report.html").exists()
    whole, left = (compass_jax.Run(tmp_path / name).metrics for name in ("whole", "left"))
    for name in set(whole) - {"memory/peak_gib"}:
        if name.startswith(("time/", "rollout/")) or name.endswith("tokens_per_s"):
            continue  # of the clock
        np.testing.assert_array_equal(whole[name], left[name], name)


def test_steps_are_taken_by_hand_and_closed(tmp_path):
    config = unsaved(tmp_path / "run")
    with steps_of(config) as steps:
        assert next(steps).number == 1
    assert checkpoint.latest(config.directory) == 1
    with pytest.raises(StopIteration):
        next(steps)
    assert list(steps) == []
    steps_of(config).close()  # before the first step: nothing was opened


def page_scripts():
    """Returns the script of the page, and its loop."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_script_of_the_page_trains_plots_generates_and_exports(tmp_path):
    """Its reward is in the main module, which has no guard and no file."""
    script, loop = page_scripts()
    assert len(script.split("\n\n", 1)[1].splitlines()) <= 15
    saved(tmp_path / "runs" / "demo" / "sft")
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = f"SMALL = {SMALL}\n{STARTED}"
    source = tmp_path / "cell.py"
    source.write_text(script)
    program += "import linecache; text = open('cell.py').read()\n"
    program += "linecache.cache['cell'] = len(text), None, text.splitlines(True), 'cell'\n"
    program += "exec(compile(text, 'cell', 'exec'))\n"
    source_of_loop = loop.replace("score, run_dir", "score, settings=SMALL, run_dir")
    program += f"del compass_jax.train\n{source_of_loop.replace('> 0.9', '>= 0')}"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "reward.png").stat().st_size > 1000
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
    run = tmp_path / "runs" / "sft-sums" / "rl"
    assert "def score(response, answer):" in (run / "reward.py").read_text()
    verifier = read_config(run).data.sources[0].verifier
    assert verifier == f"{run / 'reward.py'}:score"
    assert checkpoint.latest(run) == 2 and (run / "report.html").is_file()
    assert checkpoint.latest(tmp_path / "runs" / "short") == 1
