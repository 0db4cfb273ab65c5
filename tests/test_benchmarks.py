"""The benchmarks: the arithmetic of their reports by value, and both commands end to end on a toy
model."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import common, gpu, long_tail, rollout
from compass_jax.config import ModelConfig, MoEConfig
from compass_jax.model.flops import flops_per_token
from compass_jax.model.params import is_spec, param_specs

ROOT = Path(__file__).parent.parent


def a_round(our_rate, their_rate, gflops):
    return {
        "ours_tokens_per_s": our_rate,
        "transformers_tokens_per_s": their_rate,
        "matmul_gflops": gflops,
    }


def test_disturbed_rounds_are_dropped_and_the_ratio_is_that_of_the_medians():
    rounds = [
        a_round(10.0, 20.0, 100.0),
        a_round(30.0, 10.0, 70.0),
        a_round(1000.0, 1.0, 69.9),
        a_round(14.0, 11.0, 90.0),
    ]
    summary = common.summarise(rounds, 2e9)
    assert (summary["rounds"], summary["rounds_dropped"]) == (4, 1)
    assert [r["kept"] for r in summary["per_round"]] == [True, True, False, True]
    assert (
        summary["ours_tokens_per_s"],
        summary["transformers_tokens_per_s"],
        summary["matmul_gflops"],
    ) == (14.0, 11.0, 90.0)
    assert (summary["ours_matmul_share"], summary["transformers_matmul_share"]) == (
        round(28 / 90, 4),
        round(22 / 90, 4),
    )
    # The median of the rounds' ratios would be 14/11 too, but not their mean.
    assert summary["ratio"] == round(14 / 11, 4)


def test_flops_of_a_token_are_two_for_each_weight_that_it_meets():
    """The parameter tree is the reference: every weight except embedding and norms counts, and of
    16 experts the top 4.
    """
    moe = MoEConfig(experts=16, top_k=4, ffn=24, dense_layers=(1,))
    config = ModelConfig(
        "qwen3_moe",
        vocab_size=96,
        hidden=32,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn=40,
        moe=moe,
    )
    met = 0.0
    for path, spec in jax.tree_util.tree_leaves_with_path(param_specs(config), is_leaf=is_spec):
        name = str(path[-1].key)
        if name != "embed" and not name.endswith("norm"):
            met += math.prod(spec.shape) * (4 / 16 if spec.per_expert else 1)
    assert flops_per_token(config) == 2 * met


def test_the_ratio_is_not_the_median_of_ratios():
    summary = common.summarise(
        [a_round(10.0, 20.0, 100.0), a_round(20.0, 10.0, 100.0), a_round(30.0, 60.0, 100.0)], 1.0
    )
    assert summary["ratio"] == 1.0  # of the ratios 0.5, 2, 0.5 the median is 0.5


def test_the_side_that_goes_first_alternates_and_a_round_keeps_its_slowest_probe():
    order, probes = [], iter([5.0, 3.0, 4.0, 9.0, 8.0, 7.0, 1.0, 2.0, 3.0])
    rounds = common.run_rounds(
        lambda: order.append("ours") or 10,
        lambda: order.append("theirs") or 10,
        3,
        lambda: next(probes),
    )
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert [r["matmul_gflops"] for r in rounds] == [3.0, 7.0, 1.0]
    assert [r["first"] for r in rounds] == ["ours", "transformers", "ours"]


def test_rates_are_tokens_over_seconds(monkeypatch):
    clock = iter([0.0, 4.0, 10.0, 12.0])
    monkeypatch.setattr(common.time, "perf_counter", lambda: next(clock))
    (rates,) = common.run_rounds(lambda: 100, lambda: 50, 1, lambda: 1.0)
    assert (rates["ours_tokens_per_s"], rates["transformers_tokens_per_s"]) == (25.0, 25.0)


def test_processor_time_of_others_is_what_the_machine_spent_and_this_process_did_not(monkeypatch):
    monkeypatch.setattr(common.os, "cpu_count", lambda: 2)
    # 5 of 20 core-seconds
    assert common._others_share((100.0, 10.0), (115.0, 20.0), wall=10.0) == 0.25
    # The kernel's tick is coarser than the clock of this process.
    assert common._others_share((100.0, 10.0), (109.0, 20.0), wall=10.0) == 0.0
    assert common._others_share(None, None, wall=1.0) is None


def test_the_fastest_usable_candidate_is_chosen_by_its_best_time(monkeypatch):
    calls = []
    times = {"steady": iter([3.0, 3.0]), "disturbed": iter([9.0, 2.0])}

    def candidate(name):
        def call():
            calls.append(name)
            if name == "broken":
                raise NotImplementedError("no kernel for this machine")
            return name

        return call

    monkeypatch.setattr(common, "seconds", lambda call: next(times[call()]))
    best, best_times = common.fastest(
        "option", {name: candidate(name) for name in ("steady", "broken", "disturbed")}, repeats=2
    )
    assert (best, best_times) == ("disturbed", {"steady": 3.0, "disturbed": 2.0})
    assert calls == ["steady", "broken", "disturbed", "steady", "disturbed", "steady", "disturbed"]
    with pytest.raises(SystemExit, match="no candidate for option"):
        common.fastest("option", {"broken": candidate("broken")})


def test_other_weights_are_noticed():
    model, config, params = common.build_pair(common.SMOKE)
    assert common.compare_logits(model, config, params, common.SMOKE)[
        "logits_std"
    ] == pytest.approx(1, abs=0.2)
    shifted = {**params, "final_norm": params["final_norm"] + 0.01}
    with pytest.raises(SystemExit, match="nothing was timed"):
        common.compare_logits(model, config, shifted, common.SMOKE)


def test_the_reference_model_is_the_one_of_the_published_numbers():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen3_moe", **common.REFERENCE.model)
        )
    assert sum(p.numel() for p in model.parameters()) == 13_519_360


def run_train(capsys):
    """Runs the benchmark as a user does: in its own process."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "benchmarks.train", "--smoke", "--rounds", "2"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_rollout(capsys):
    """Runs the benchmark in this process, which has imported the modules already."""
    rollout.main(["--smoke", "--rounds", "2"])
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_train, run_rollout])
def test_the_command_ends_with_one_line_of_json(run, capsys):
    (line,) = run(capsys).splitlines()
    summary = json.loads(line)
    assert (
        summary["benchmark"] == run.__name__.removeprefix("run_")
        and summary["smoke"]
        and summary["rounds"] == 2
    )
    kept_rounds = [r for r in summary["per_round"] if r["kept"]]
    assert len(kept_rounds) == 2 - summary["rounds_dropped"] and len(summary["per_round"]) == 2
    for key in ("ours_tokens_per_s", "transformers_tokens_per_s"):
        # The median of one or two rounds is their mean.
        assert summary[key] == pytest.approx(
            sum(r[key] for r in kept_rounds) / len(kept_rounds), abs=0.2
        )
    assert summary["ratio"] == pytest.approx(
        summary["ours_tokens_per_s"] / summary["transformers_tokens_per_s"], rel=0.05
    )
    assert summary["agreement"]["logits_max_abs_diff"] < 1e-4 and summary["ours_compile_s"] > 0
    assert summary["others_cpu_share_max"] is None or 0 <= summary["others_cpu_share_max"] <= 1.1
    assert set(summary["transformers_options"]) >= {"experts", "attention"}


@pytest.mark.slow
def test_the_long_tail_ends_with_one_line_of_json(capsys):
    long_tail.main(["--smoke", "--rounds", "2"])
    (line,) = capsys.readouterr().out.splitlines()
    summary = json.loads(line)
    assert (
        summary["benchmark"] == "long_tail"
        and summary["smoke"]
        and summary["requests"] == 12
        and summary["ratio"] > 0
    )
    assert 0 < summary["slot_occupancy"] <= 1 and summary["arrival_over_longest_first"]["steps"] > 0


@pytest.mark.slow
def test_the_parts_of_the_gpu_benchmark_measure(tmp_path, capsys):
    gpu.main(["--smoke", "--trace", str(tmp_path)])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    sizes = gpu.SMOKE
    losses, decoded = summary["train"]["losses"], summary["decode"][f"{sizes.slots[0]} slots"]
    assert losses[0] == pytest.approx(np.log(sizes.model.vocab_size), rel=0.1)
    assert losses[-1] < losses[0] and summary["train"]["gradient_repeats_bit_for_bit"]
    # In bfloat16 on a CPU both sides choose the same routes, or replay brings them closer.
    replay = summary["replay"]
    assert replay["tokens"] == sizes.slots[0] * sizes.new_tokens
    assert replay["replayed"]["tokens_routed_otherwise"] == 0
    assert replay["replayed"]["mean_abs_gap"] <= replay["live"]["mean_abs_gap"] < 0.01
    share = sizes.model.mixture.top_k / sizes.model.mixture.experts
    assert share <= decoded["experts_read"] <= 1 and decoded["token_ms"] > 0
    rows = sizes.rows * sizes.length
    assert summary["products"][f"experts ragged, {sizes.slots[0]} tokens"]["ms"] > 0
    assert f"experts tokamax, {rows} tokens" in summary["products"]
    assert {file.parents[3].name for file in tmp_path.rglob("*.xplane.pb")} == {
        "train",
        f"decode_{sizes.slots[0]}_slots",
    }


def test_the_mix_is_log_normal_and_expectations_are_off_by_their_factor():
    lengths, expected = long_tail.request_lengths(4096, 512, 64)
    assert (
        np.median(lengths) == pytest.approx(64, rel=0.05)
        and lengths.max() == 512
        and lengths.min() >= 1
    )
    assert np.std(np.log(expected / lengths)) == pytest.approx(0.5, rel=0.05)


def test_a_number_of_rounds_that_cannot_be_is_refused(capsys):
    with pytest.raises(SystemExit):
        common.arguments("x", ["--rounds", "0"])
    assert "at least 1" in capsys.readouterr().err
