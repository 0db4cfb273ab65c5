"""The router replay experiment: a log of JSON lines that survives a kill, the arithmetic of the
tables by hand, and a toy run end to end."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve

from benchmarks import experiments, router_replay, router_replay_report
from benchmarks.router_replay_setup import full, smoke
from compass_jax.model.transformer import init_params
from compass_jax.runs.rundir import RunDir


def test_rows_come_back_and_a_line_cut_by_a_kill_is_dropped_and_replaced(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    assert experiments.finished(path) == []
    experiments.append(path, {"a": 1})
    with path.open("a") as out:
        out.write('{"a": 2, "b"')
    assert experiments.finished(path) == [{"a": 1}]
    experiments.append(path, {"a": 3})
    assert experiments.finished(path) == [{"a": 1}, {"a": 3}]
    assert path.read_text() == '{"a": 1}\n{"a": 3}\n'


def test_a_damaged_line_in_the_middle_is_an_error_and_nan_is_not_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\nbroken\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: not a line of JSON"):
        experiments.finished(path)
    with pytest.raises(ValueError, match="Out of range float"):
        experiments.append(tmp_path / "other.jsonl", {"a": float("nan")})


def test_the_hash_of_a_configuration_ignores_where_it_runs_and_nothing_else():
    config = full().deep
    elsewhere = evolve(config, run_dir="x", init_from="y", data={"tokenizer": "z/tiny_tokenizer"})
    assert experiments.config_hash(config) == experiments.config_hash(elsewhere)
    for other in (dataclasses.replace(config, seed=1), evolve(config, rl={"replay": "R2"})):
        assert experiments.config_hash(other) != experiments.config_hash(config)


def test_the_configurations_are_what_the_experiment_says(tmp_path):
    setup = full()
    moe = setup.deep.model.moe
    assert (setup.deep.model.layers, len(setup.deep.model.moe_layers), moe.experts, moe.top_k) == (
        16,
        16,
        64,
        8,
    )
    for variant, quantize in router_replay.PRECISIONS.items():
        config = setup.replay(variant, quantize, 2)
        assert (
            config.rollout.dtype,
            config.rollout.quantize,
            config.compute.dtype,
            config.seed,
        ) == ("bfloat16", quantize, "float32", 2)
        assert config.rl.updates_per_rollout == max(setup.updates) == 8
    slow, fast = (setup.replay(v, "off", 0).rl.optim.learning_rate for v in ("bf16_slow", "bf16"))
    assert slow == pytest.approx(fast / 10)
    off, r3 = (setup.curve(mode, 1, tmp_path).validate_for_rl() for mode in ("off", "R3"))
    assert (off.rl.replay, r3.rl.replay, off.rl.correction.name, off.rl.updates_per_rollout) == (
        "off",
        "R3",
        "off",
        8,
    )
    expected = evolve(off, run_dir=r3.run_dir, rl={"replay": "R3"})
    assert expected == r3 and off.rollout.dtype == "bfloat16"


def test_a_cold_start_outlives_a_change_of_the_settings_that_it_does_not_use(tmp_path):
    setup = smoke()
    with RunDir(setup.cold_start(0, tmp_path)):
        (tmp_path / "sft_seed0" / "metrics.jsonl").write_text("{}\n")
    other = evolve(setup, deep={"rl": {"prompts_per_step": 16}})
    with RunDir(other.cold_start(0, tmp_path)) as run:
        assert run.resumed


def test_flips_are_of_sets_and_leave_out_what_either_side_lacks():
    a = np.array(
        [[[[1, 2], [3, 4]], [[1, 2], [3, 4]], [[5, 6], [0, 1]], [[255, 255], [255, 255]]]], np.uint8
    )
    b = np.array(
        [[[[2, 1], [3, 4]], [[1, 3], [3, 5]], [[5, 6], [0, 2]], [[1, 2], [3, 4]]]], np.uint8
    )
    flips = router_replay.flips_between(jnp.asarray(a), jnp.asarray(b))
    assert flips["flip_frac"] == pytest.approx(3 / 6)
    assert flips["flip_any_frac"] == pytest.approx(2 / 3)
    assert flips["flip_by_layer"] == pytest.approx([1 / 3, 2 / 3], abs=1e-5)


def test_distance_and_rounding_of_chosen_weights():
    tree = {"router": jnp.full((2, 2), 1.001), "gate": jnp.full((2, 2), 1.001), "norm": jnp.ones(2)}
    assert float(router_replay.distance(tree, tree)) == 0
    moved = {**tree, "gate": tree["gate"] + 0.5}
    assert router_replay.distance(moved, tree) == pytest.approx(
        1.0 / np.sqrt(8 * 1.001**2 + 2), rel=1e-5
    )
    rounded = router_replay.round_weights(tree, "router")
    assert float(rounded["router"][0, 0]) == 1.0 and rounded["router"].dtype == jnp.float32
    np.testing.assert_array_equal(rounded["gate"], tree["gate"])
    assert float(router_replay.round_weights(tree, "all")["gate"][0, 0]) == 1.0
    np.testing.assert_array_equal(
        router_replay.round_weights(tree, "none")["router"], tree["router"]
    )


def fake_rows():
    def point(mode, updates, gap, kl):
        measures = {"logp_abs_diff": gap, "kl_k3": kl, "extreme_frac": 0.0, "ess": 1.0}
        return {
            "mode": mode,
            "updates": updates,
            "distance": 0.01,
            "flip_frac": 0.02,
            "now": measures,
            "recorded": measures,
            "drift": 0.0,
        }

    gaps = [(0, 0.04, 0.01), (1, 0.06, 0.01)]
    return [
        {
            "variant": "bf16",
            "seed": seed,
            "commit": "c",
            "seconds": 60.0,
            "points": [point("off", u, off, 1e-3) for u in (0, 1)]
            + [point("R3", u, r3, 2e-4) for u in (0, 1)],
        }
        for seed, off, r3 in gaps
    ]


def test_the_tables_hold_means_and_spreads_and_the_bars_are_judged_by_the_worst_seed(tmp_path):
    rows = fake_rows()
    assert router_replay_report.ratios(rows, "bf16", "logp_abs_diff") == pytest.approx([4.0, 6.0])
    text = router_replay_report.verdict(rows)
    assert "off / R3 = 5.0 ± 1.4 (seeds: 4.0, 6.0); asked for: 3; met." in text
    assert "off / R3 = 5.0 ± 0.0 (seeds: 5.0, 5.0); asked for: 10; missed." in text
    assert (
        "| bfloat16 | off | 5.00e-02 ± 1.41e-02 | 1.00e-03 ± 0.00e+00 |"
        in router_replay_report.fresh_table(rows)
    )
    # The four lines are the header, the rule, off, and R3 after one update.
    assert router_replay_report.stale_table(rows).count("\n") == 2 + 2
    newer = {**rows[0], "seconds": 1.0}
    assert router_replay_report.latest([*rows, newer]) == [newer, rows[1]]
    assert router_replay_report.spread([0.5]) == "5.00e-01"


def test_a_report_of_curves_alone_is_written(tmp_path):
    """A run with --only curve_off has curves, but no gaps and no causes."""
    names = ("reward/mean", "mismatch/logp_abs_diff", "mismatch/kl_k3", "entropy_nats", "grad_norm")
    row = {
        "variant": "curve_off",
        "seed": 0,
        "config": "x",
        "commit": "c",
        "smoke": False,
        "seconds": 1.0,
        "avg_at_k": 0.5,
        "greedy": 0.6,
    }
    router_replay_report.write_report(
        [{**row, "curves": {name: [0.1, 0.2] for name in names}}], tmp_path
    )
    assert (
        "| off | 1 |" in (tmp_path / "router_replay.md").read_text()
        and (tmp_path / "router_replay.png").stat().st_size > 10_000
    )


def check_points(rows):
    """Checks the relations between the points: R2 starts as if replay were off, and recorded
    log-probs drift from current ones as the weights move. Returns the points.
    """
    points = {(p["mode"], p["updates"]): p for p in rows["bf16"]["points"]}
    assert set(points) == {(mode, u) for mode in ("off", "R2", "R3") for u in (0, 1, 4, 8)}
    assert (
        points["R2", 0]["recorded"] == points["off", 0]["recorded"]
        and points["R2", 0]["drift"] == 0
    )
    moved = [points["R3", u]["distance"] for u in (0, 1, 4, 8)]
    assert moved[0] == 0 and moved == sorted(moved) and 1e-4 < moved[1] < moved[3] < 0.1
    for mode in ("off", "R2", "R3"):
        assert points[mode, 8]["drift"] > points[mode, 1]["drift"] > 0
        assert (
            points[mode, 8]["recorded"]["logp_abs_diff"]
            > 3 * points[mode, 0]["recorded"]["logp_abs_diff"]
        )
    return points


def check_causes(rows, fresh):
    """Checks that float32 everywhere leaves rounding alone, and that replay of fresh routes flips
    none.
    """
    causes = {p["cause"]: p for p in rows["causes"]["points"]}
    assert (
        causes["nothing in bfloat16"]["off"]["logp_abs_diff"] < 1e-5
        and causes["nothing in bfloat16"]["flip_frac"] == 0
    )
    full_gap = causes["all in bfloat16"]["R3"]["logp_abs_diff"]
    # It compares the routes of that sampler with the routes of the rollout.
    assert full_gap == pytest.approx(fresh["now"]["logp_abs_diff"], rel=0.5)
    assert all(
        causes[f"only {part} in bfloat16"]["R3"]["logp_abs_diff"] < full_gap
        for part in router_replay.PARTS
    )


@pytest.mark.slow
def test_a_toy_run_end_to_end_and_again(tmp_path, capsys):
    """The first run has the numbers of every part of the experiment; a second run finds every part
    done.
    """
    command = [
        "--smoke",
        "--out",
        str(tmp_path),
        "--seeds",
        "0",
        "--only",
        "bf16",
        "causes",
        "curve_R3",
    ]
    router_replay.main(command)
    rows = {row["variant"]: row for row in experiments.finished(tmp_path / "router_replay.jsonl")}
    assert (
        set(rows) == {"bf16", "causes", "curve_R3"}
        and all(row["smoke"] for row in rows.values())
        and rows["bf16"]["response_tokens"] > 20
    )
    points = check_points(rows)
    check_causes(rows, points["R3", 0])
    curve = rows["curve_R3"]["curves"]
    assert len(curve["reward/mean"]) == 2 and min(curve["mismatch/logp_abs_diff"]) > 1e-5
    assert (tmp_path / "router_replay.png").stat().st_size > 10_000 and "missed" in (
        tmp_path / "router_replay.md"
    ).read_text()
    before = (tmp_path / "router_replay.jsonl").read_text()
    capsys.readouterr()
    router_replay.main(command)
    assert (
        capsys.readouterr().out.count("done before") == 3
        and (tmp_path / "router_replay.jsonl").read_text() == before
    )
    assert len(json.loads(before.splitlines()[0])["config"]) == 12


def test_params_of_the_full_model_are_as_many_as_its_docstring_says():
    config = full().deep
    shapes = jax.eval_shape(lambda: init_params(config.model, config.compute, jax.random.key(0)))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == pytest.approx(6.6e6, rel=0.01)
