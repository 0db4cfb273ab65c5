"""The benchmarks of merging: the size of the models that they make, and a command's peak memory."""

import json
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import merge, merge_sweep
from compass_jax.model.params import abstract_params


@pytest.mark.parametrize("gib", [1, 2])
def test_the_models_have_the_size_that_was_asked_for(gib):
    import jax

    config = merge.model_of_size(gib * 2**30, smoke=False)
    size = sum(2 * leaf.size for leaf in jax.tree.leaves(abstract_params(config, "bfloat16")))
    assert 1 <= size / gib / 2**30 < 1.12


def test_the_peak_is_the_commands_and_not_this_processes():
    """One child holds 200 MB for half a second; the peak of the small child after it does not
    include them.
    """
    program = "import time; x = bytearray({}); x[::4096] = b'1' * len(x[::4096]); time.sleep(0.5)"
    costs = [
        merge.cost_of([sys.executable, "-c", program.format(size)]) for size in (200_000_000, 1_000)
    ]
    assert 200e6 < costs[0].peak_bytes < 260e6 and costs[1].peak_bytes < 60e6
    for cost in costs:
        assert cost.seconds >= 0.5 and 0 < cost.cpu_seconds < cost.seconds


def test_a_command_that_fails_ends_the_benchmark():
    with pytest.raises(SystemExit, match="ended with exit status 3"):
        merge.cost_of([sys.executable, "-c", "raise SystemExit(3)"])


def test_each_part_of_the_sweep_is_a_run_that_can_be(tmp_path):
    assert len(merge_sweep.models()) == 4
    for model in merge_sweep.models().values():
        for part in merge_sweep.TASKS:
            config = merge_sweep.config_of(model, tmp_path, part, 40).validate()
            assert (config.init_from == "") == (part == "base")


def test_a_sweep_is_drawn_with_accuracies_that_are_unknown(tmp_path):
    accuracies = ({"all": 0.5, "set/mine": None}, {"all": 0.7, "set/mine": 0.2})
    rows = [
        {"weight": n, "k": 4, "labels": {name: {"avg_at_k": x} for name, x in row.items()}}
        for n, row in enumerate(accuracies)
    ]
    merge_sweep.plot_sweep(rows, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_merge_is_measured(tmp_path, capfd):
    merge.main(["--smoke", "--out", str(tmp_path / "merge"), "--method", "ties"])
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    (row,) = summary["merges"]
    assert summary["smoke"] and row["method"] == "ties" and 1e8 < row["peak_bytes"] < 1e9
    assert row["tensors_per_s"] == pytest.approx(summary["tensors"] / row["seconds"], rel=0.01)
    assert not (tmp_path / "merge").exists()
