"""Real tiny SFT runs whose conversations share rows: they have the losses of separate rows and less
padding, continue exactly after a stop, and are refused if rows cannot be shared.
"""

import dataclasses
import itertools
import types

import pytest
from logged import numbers
from processes import Job
from stops import stop_after_step
from test_processes import MESH, compare
from test_streamed_sft import configured, rows

from compass_jax.config import ConfigError, MeshConfig
from compass_jax.training import sft
from compass_jax.training.scalar import ScalarTrainer
from compass_jax.training.sft import run_sft


def packing(folder, file, **options):
    folder.mkdir(exist_ok=True)
    return configured(folder, file, **{"packing": True, "steps": 5, **options})


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Returns a file with which a pass has 18 rows and an update 8 conversations; two rows are left
    out.
    """
    return rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 16, "{broken", "")


@pytest.mark.parametrize("reading", ["record", pytest.param("memory", marks=pytest.mark.slow)])
def test_a_packed_run_has_the_losses_of_one_that_is_not_and_less_padding(
    tmp_path, file, reading, monkeypatch
):
    """Tokens per second count the tokens of the conversations. Each reading of the clock is half a
    second later, and the rate uses the second reading after the start.
    """
    seconds = itertools.count(step=0.5)
    clock = types.SimpleNamespace(perf_counter=lambda: next(seconds))
    monkeypatch.setattr(sft, "time", clock)
    speeds = []
    for name, on in (("apart", False), ("packed", True)):
        config = packing(tmp_path / name, file, packing=on, reading=reading, bad_rows="skip")
        speeds.append(run_sft(config)["train/tokens_per_s"])
    separate, packed = (numbers(tmp_path / name / "run") for name in ("apart", "packed"))
    assert speeds[0] == speeds[1] and 8 * 16 <= speeds[0] <= 8 * 104
    for metrics, count in ((separate, 8), (packed, 2)):  # rows of 104 tokens
        assert metrics[-1]["padding_frac"] == pytest.approx(1 - speeds[0] / (count * 104))
    for actual, expected in zip(packed, separate, strict=True):
        for metric in ("sft/loss", "entropy_nats", "grad_norm", "moe/load_max_over_mean", "epoch"):
            assert actual[metric] == pytest.approx(expected[metric], rel=2e-4), metric


@pytest.mark.parametrize("weights", [(), (("rows", 1.0), ("sum", 2.0))], ids=["a pass", "weights"])
def test_a_packed_run_that_is_stopped_in_a_pass_goes_on_bit_for_bit(
    tmp_path, file, weights, monkeypatch
):
    """The rows are read by record; with weights, worked solutions are mixed in."""
    options = {"bad_rows": "skip", "weights": weights}
    options |= {"procedural": (("sum", 12, 1),)} if weights else {}
    run_sft(packing(tmp_path / "whole", file, **options))
    parts = packing(tmp_path / "parts", file, **options)
    with monkeypatch.context() as patch:
        stop_after_step(patch, 3)
        stopped = run_sft(parts)
    assert stopped["stopped"] and stopped["steps"] == 3 and stopped["epoch"] % 1
    assert run_sft(parts)["steps"] == 5
    assert numbers(tmp_path / "parts" / "run") == numbers(tmp_path / "whole" / "run")


def test_what_cannot_be_packed_is_refused_by_name(tmp_path, file):
    config = packing(tmp_path, file)
    split = dataclasses.replace(config, mesh=MeshConfig(context=2))
    with pytest.raises(ConfigError, match=r"sft\.packing with mesh\.context = 2: .*; set mesh"):
        split.validate()
    dataclasses.replace(split, sft=dataclasses.replace(config.sft, packing=False)).validate()
    trainer = ScalarTrainer.__new__(ScalarTrainer)
    trainer.config, trainer.sft = config, config.sft
    with pytest.raises(ConfigError, match=r"sft\.packing with a scalar reward model.*to False"):
        trainer.examples()


@pytest.mark.slow
def test_two_processes_pack_as_one_does_and_take_over_from_it(tmp_path):
    """They stop in the middle of a pass, and the numbers are those of one undisturbed process."""
    file = rows(tmp_path / "rows.jsonl", 30, "{broken", "")
    results = {}
    for name, counts in (("alone", (1,)), ("changing", (1, 2))):
        folder = tmp_path / name
        folder.mkdir()
        for number, count in enumerate(counts, 1):
            sft = (
                f"sft=replace(config.sft, steps={4 * number // len(counts)}, procedural=(),"
                f" files=({file!r},), reading='record', bad_rows='skip', packing=True)"
            )
            data = f"data=replace(config.data, eval_prompts=0, cache={str(folder)!r})"
            with Job(folder, count, *MESH, command="sft", run=f"{sft}, {data}") as job:
                job.finish()
        results[name] = numbers(job.directory)
    assert len(results["alone"]) == 4 and results["alone"][0]["padding_frac"] < 0.7
    compare(results["changing"], results["alone"])
