"""RL in two processes of four devices each: they have the numbers of one process, also after a kill
or a stop of one of them.
"""

import dataclasses
import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from logged import lines, numbers
from processes import Job, write_config
from tiny import random_params
from tiny_run import tiny_run

from compass_jax.commands.configured import load_config
from compass_jax.config import MeshConfig
from compass_jax.training.rl import run_rl
from compass_jax.training.saved import IN_FLIGHT
from compass_jax.weights import checkpoint
from compass_jax.weights.hf import save_params

MESH = ("--mesh.fsdp", "2", "--mesh.expert", "2", "--mesh.tensor", "2")


def compare(actual, expected, tolerance=1e-5):
    assert len(actual) == len(expected) > 0
    for row, expected_row in zip(actual, expected, strict=True):
        assert row.keys() == expected_row.keys()
        for name in expected_row:
            if expected_row[name] is None:
                assert row[name] is None
                continue
            np.testing.assert_allclose(
                row[name], expected_row[name], rtol=tolerance, atol=tolerance, err_msg=name
            )


def run(folder, count, *options, **settings):
    """Runs a job to its end; returns its directory."""
    folder.mkdir()
    with Job(folder, count, *options, **settings) as job:
        job.finish()
    return job.directory


def samples(directory):
    rows = [sample for row in lines(directory, "rollouts") for sample in row["samples"]]
    for sample in rows:
        # this value is rounded, and its mean is a metric
        sample.get("components", {}).pop("judge_entropy_nats", None)
    return rows


def same_samples(first, second):
    return samples(first) == samples(second)


def run_here(folder, mesh):
    """Starts or resumes a run in this process of eight devices; returns its directory."""
    folder.mkdir(exist_ok=True)
    directory = folder / "run"
    run_rl(
        dataclasses.replace(
            load_config(str(write_config(folder))), run_dir=str(directory), mesh=mesh
        )
    )
    return directory


def stop_the_second(job):
    """Sends SIGTERM to the second of two processes, in the second rollout; returns the number of
    saved steps.
    """
    job.wait_for(lambda: checkpoint.latest(job.directory) == 1)
    time.sleep(0.3)  # into the next rollout
    job.send(1, signal.SIGTERM)
    job.finish(143)
    assert "stopped on request" in job.log(0) and "stopped" not in job.log(1)
    reached = job.steps()
    assert 1 <= reached < 4 and checkpoint.latest(job.directory) == reached
    return reached


@pytest.mark.slow
def test_a_stop_and_a_kill_in_one_of_two_processes(tmp_path):
    """The second process gets a SIGTERM; after a restart it gets a SIGKILL; then the run continues
    in one process, on another mesh.
    """
    command = (tmp_path, 2, *MESH)
    with Job(*command) as job:
        reached = stop_the_second(job)
    with Job(*command) as job:
        job.wait_for(lambda: job.steps() > reached)
        job.send(1, signal.SIGKILL)
        started = time.monotonic()
        codes = job.codes()
        assert time.monotonic() - started < 30 and codes[1] == -signal.SIGKILL and codes[0] != 0
        assert f"process 0 of 2 (pid {job.processes[0].pid} on " in job.log(0)
        # the message of the other process, or of JAX if that ends the process first
        last = ("start the same command in every process", "another task died")
        assert any(words in job.log(0) for words in last)
    undisturbed = run_here(tmp_path / "one", MeshConfig(fsdp=2, expert=2, tensor=2))
    run_here(tmp_path, MeshConfig(fsdp=4, context=2))
    compare(numbers(job.directory), numbers(undisturbed))
    assert same_samples(job.directory, undisturbed)


VARIANTS = {
    "R2 and growth": (
        (
            "replay='R2', updates_per_rollout=2, group_size=2,"
            # AdamW turns a gradient of rounding alone into a whole step; eps keeps it small
            " optim=replace(config.rl.optim, eps=1e-3),"
            " zero_variance=ZeroVarianceConfig(rl_zvp=True, grow_to=4)"
        ),
        "mesh=MeshConfig(fsdp=8)",
    ),
    "dynamic": (
        "group_size=2, zero_variance=ZeroVarianceConfig(rl_zvp=False, dynamic_sampling=True)",
        "mesh=MeshConfig(fsdp=2, expert=2, tensor=2)",
    ),
    "screening": (
        (
            "step_policy=Screening(n0=2, min_chance=1.0),"
            " zero_variance=ZeroVarianceConfig(rl_zvp=True, posterior=True)"
        ),
        "mesh=MeshConfig(fsdp=4, expert=2)",
    ),
    "state": (
        (
            "predictor=State(features=16, refresh=2),"
            " zero_variance=ZeroVarianceConfig(posterior=True)"
        ),
        "mesh=MeshConfig(fsdp=4, expert=2)",
    ),
    "replay": (
        (
            "group_size=2, hooks=(GroupReplay(groups=4, max_age=2, max_route_age=1),),"
            " zero_variance=ZeroVarianceConfig(rl_zvp=False)"
        ),
        "mesh=MeshConfig(fsdp=4, expert=2)",
    ),
    "partial": ("partial_prompts=3", "mesh=MeshConfig(fsdp=4, expert=2)"),
    "the policy as its judge": (
        "zero_variance=ZeroVarianceConfig(rl_zvp=False)",
        (
            "mesh=MeshConfig(fsdp=4, expert=2), **_judged(config, EngineJudgeConfig("
            "prompt_buckets=(2048,), max_tokens=8, slots=8, temperature=1.0))"
        ),
    ),
    "a reward model": (
        "zero_variance=ZeroVarianceConfig(rl_zvp=False)",
        (
            "mesh=MeshConfig(fsdp=2, expert=2, tensor=2),"
            " **_judged(config, ScalarJudgeConfig(_REWARD_MODEL))"
        ),
    ),
    "two meshes, pages, a reference": (
        "eval_every=2, objective=Grpo(kl_coef=0.01)",
        (
            "mesh=MeshConfig(context=2, expert=4), rollout_mesh=MeshConfig(expert=4, tensor=2),"
            " rollout=replace(config.rollout, cache_pages=40, page_tokens=8),"
            " data=replace(config.data, eval_prompts=4)"
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_two_processes_give_the_numbers_of_one(tmp_path, variant):
    rl, changes = VARIANTS[variant]
    if variant == "a reward model":
        base = tiny_run()
        model = dataclasses.replace(base.model, layers=1, max_positions=4096)
        weights = random_params(model, seed=3), model, tmp_path / "judge", "float32"
        save_params(*weights, tokenizer_from=base.data.tokenizer)
    one, two = (run(tmp_path / str(count), count, rl=rl, run=changes) for count in (1, 2))
    compare(numbers(two), numbers(one))
    assert same_samples(two, one)


@pytest.mark.slow
def test_a_stop_in_a_rollout_keeps_its_samples(tmp_path):
    """After a SIGTERM to one of two processes within a rollout, its samples, their routes and the
    unfinished samples come back, in both.
    """
    settings = {"rl": "group_size=8, steps=3"}
    one = run(tmp_path / "one", 1, *MESH, **settings)
    (tmp_path / "two").mkdir()
    with Job(tmp_path / "two", 2, *MESH, **settings) as job:
        job.wait_for(lambda: checkpoint.latest(job.directory) == 1)
        time.sleep(0.4)
        job.send(1, signal.SIGTERM)
        job.finish(143)
        assert (
            "finished rollouts of the next" in job.log(0)
            and checkpoint.read_meta(job.directory / IN_FLIGHT)["pending"]
        )
    with Job(tmp_path / "two", 2, *MESH, **settings) as job:
        job.finish()
    compare(numbers(job.directory), numbers(one))
    assert same_samples(job.directory, one)


@pytest.mark.slow
def test_twenty_steps_with_a_kill_of_each_process(tmp_path):
    """Two undisturbed processes have the numbers of one. If each is killed once, they have the
    numbers of the undisturbed two, to the last bit.
    """
    settings = {"rl": "steps=20, optim=replace(rl.optim, learning_rate=1e-3)"}
    one, two = (run(tmp_path / str(count), count, *MESH, **settings) for count in (1, 2))
    compare(numbers(two), numbers(one))
    (tmp_path / "killed").mkdir()
    for number in (0, 1):
        with Job(tmp_path / "killed", 2, *MESH, **settings) as job:
            before = checkpoint.latest(job.directory) or 0
            job.wait_for(
                lambda job=job, before=before: (checkpoint.latest(job.directory) or 0) >= before + 3
            )
            time.sleep(0.5)
            job.send(number, signal.SIGKILL)
            assert 0 not in job.codes(), job.log_tails()
    with Job(tmp_path / "killed", 2, *MESH, **settings) as job:
        job.finish()
    assert numbers(job.directory) == numbers(two) and same_samples(job.directory, two)


@pytest.mark.slow
def test_fine_tuning_and_evaluation_in_two_processes(tmp_path):
    """SFT is stopped at one process and continued by the same command; then its weights are
    evaluated.
    """
    results = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        tuned = {
            "command": "sft",
            "run": (
                "sft=replace(config.sft, steps=6, save_every=1), data=replace(config.data,"
                " eval_prompts=4)"
            ),
        }
        if count == 2:
            with Job(folder, count, *MESH, **tuned) as job:
                job.wait_for(lambda job=job: job.steps() >= 2)
                job.send(1, signal.SIGTERM)
                job.finish(143)
                assert 2 <= job.steps() < 6
        with Job(folder, count, *MESH, **tuned) as job:
            job.finish()
        with Job(
            folder,
            count,
            *MESH,
            "--checkpoint",
            str(job.directory),
            **{**tuned, "command": "eval"},
        ) as evaluation:
            evaluation.finish()
        table = [line for line in evaluation.log(0).splitlines() if "│" in line or "pass@" in line]
        results[count] = numbers(job.directory), table
    compare(results[2][0], results[1][0])
    assert results[2][1] == results[1][1] and len(results[1][1]) > 2


@pytest.mark.slow
def test_a_filter_and_a_judge_in_two_processes_are_those_of_one(tmp_path):
    """The pass rates are the same line by line, and so are a judge's training and its verdicts on
    held-out pairs. The second process prints no table and writes no file.
    """
    start = run(tmp_path / "sft", 1, *MESH, command="sft", run="sft=replace(config.sft, steps=1)")
    results = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        out = folder / "filtered"
        options = ("--checkpoint", str(start), "--out", str(out), "--samples", "2")
        with Job(folder, count, *MESH, *options, command="filter") as job:
            job.finish()
        assert "kept" in job.log(0) and (count == 1 or "kept" not in job.log(1))
        pairs = folder / "pairs.jsonl"
        rows = [
            {"prompt": f"{n}: which?", "candidate": str(n % 7), "anchor": str(n % 5), "verdict": x}
            for n, x in enumerate(("Better", "Worse", "Tie") * 8)
        ]
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = f"**_of_pairs(config, {str(pairs)!r})"
        with Job(folder, count, *MESH, command="train-judge", run=settings) as job:
            job.finish()
        rulings = [
            (row["gold"], row["first"], row["swapped"])
            for stage in ("sft", "rl")
            for row in map(
                json.loads,
                (job.directory / f"judged_{stage}" / "rulings.jsonl").read_text().splitlines(),
            )
        ]
        rates = (out / "pass_rates.jsonl").read_text()
        results[count] = (
            rates,
            rulings,
            numbers(job.directory / "sft"),
            numbers(job.directory / "rl"),
        )
    assert results[2][:2] == results[1][:2] and len(results[1][1]) > 4
    compare(results[2][2], results[1][2])
    compare(results[2][3], results[1][3])


@pytest.mark.slow
def test_alpha_is_calibrated_in_two_processes_as_in_one(tmp_path):
    start = run(tmp_path / "sft", 1, *MESH, command="sft", run="sft=replace(config.sft, steps=1)")
    results = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        out = folder / "alpha"
        options = ("--checkpoint", str(start), "--out", str(out), "--rl.objective", "espo")
        module = "benchmarks.calibrate_alpha"
        settings = "rl=replace(config.rl, updates_per_rollout=2)"
        with Job(folder, count, *MESH, *options, module=module, run=settings) as job:
            job.finish()
        assert "clip" in job.log(0) and (count == 1 or "clip" not in job.log(1))
        assert [path.name for path in out.iterdir()] == ["alpha.json"]
        results[count] = json.loads((out / "alpha.json").read_text())
    first, second = (results[count].pop("rows") for count in (1, 2))
    compare(second, first)
    assert results[2].keys() == results[1].keys() and len({row["clip_frac"] for row in first}) > 3


@pytest.mark.slow
def test_two_processes_follow_a_run_with_the_numbers_of_one(tmp_path):
    """They wait for its checkpoints and evaluate each; the second process prints and writes
    nothing.
    """
    tuned = (
        "sft=replace(config.sft, steps=2, save_every=1), keep_checkpoints=9,"
        " data=replace(config.data, eval_prompts=4)"
    )
    trained = run(tmp_path / "sft", 1, *MESH, command="sft", run=tuned)
    results = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        followed = Path(shutil.copytree(trained, folder / "followed"))
        later = followed.rename(folder / "later") / "checkpoints"
        followed.mkdir()
        shutil.copy(later.parent / "config.json", followed)
        out = folder / "evaluations"
        words = ("--checkpoint", str(followed), "--follow", "--out", str(out))
        with Job(folder, count, *MESH, *words, command="eval", run=tuned) as job:
            job.wait_for(lambda job=job: "waiting for the first checkpoint" in job.log(0))
            later.rename(followed / "checkpoints")
            job.finish()
        assert count == 1 or "checkpoint" not in job.log(1)
        results[count] = lines(out)
        assert sorted(x.name for x in out.glob("step_*")) == ["step_00000001", "step_00000002"]
    assert results[1] == results[2] and [row["step"] for row in results[1]] == [1, 2]
