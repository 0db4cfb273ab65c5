"""The numbers of README.md and of a few pages are those of the raw files. The tables of
docs/results.md are generated (test_results.py).
"""

import json
from pathlib import Path
from statistics import mean

from benchmarks import parity, plans
from compass_jax.commands.configured import load_config

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()


def rows(name):
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def document(name):
    return json.loads((RESULTS / name).read_text())


def test_the_demo():
    result = document("demo_seed0.json")
    tokens, minutes = (
        result["rl"][f"first_passage_{cost}"] / result["grpo"][f"first_passage_{cost}"]
        for cost in ("tokens", "minutes")
    )
    assert result["rl"]["passed"] and result["grpo"]["passed"] and minutes > 1
    assert f"[{tokens:.2f} of its tokens](benchmarks/results/demo_seed0.json), in more" in README
    assert f"offline, {result['wall_minutes']} minutes on two busy cores" in README


def test_a_pretrained_model():
    runs = [x for x in rows("smollm2.jsonl") if x.get("commit") == "before b9c800c4"]
    result = next(x["result"] for x in runs if x["stage"] == "compare")
    gain = result["sets"]["heldout"]["avg_at_k"]
    assert f"from {gain['first']:.0%} to [{gain['second']:.0%} sampled accuracy]" in README
    seconds = sum(x["metrics"]["time/step_s"] for x in runs if x["stage"] == "rl")
    assert f"in {seconds / 60:.0f} minutes on one core" in README


def test_beside_trl():
    speeds = [x["moe"] for x in rows("against_trl.jsonl") if "moe" in x][-1]
    ours, trl = (speeds[f"{x}_step_s"] / speeds[f"{x}_tokens"] for x in ("ours", "trl"))
    assert f"[{trl / ours:.2f} times fewer seconds a token]" in README
    gaps = parity.difference(rows("parity.jsonl"), "moe")
    assert gaps["seeds"] == [8, 8] and "(eight seeds)" in README
    assert gaps["avg_at_4"]["low"] < 0 < gaps["avg_at_4"]["high"]


def test_objectives():
    runs = rows("objectives.jsonl")
    ends = {
        variant: mean(
            x["accuracy"] for x in runs if (x["task"], x["variant"]) == ("decisions", variant)
        )
        for variant in ("espo", "gspo", "grpo", "dapo", "cispo")
    }
    assert max(ends, key=ends.get) == "espo"
    assert "the best of five on one [task at one size]" in README


def test_a_pod():
    plan = document("plans/qwen3_30b_a3b_v5p_4x4x4.json")
    sizes = f"{plan['hbm_gib_per_chip']:.1f} GiB of {plan['hbm_limit_gib']:.1f}"
    assert f"on 64 TPU v5p chips [needs {sizes}]" in README and plan["devices"] == 64
    page = (DOCS / "howto" / "pod.md").read_text()
    assert f"[needs {sizes.replace(' GiB', '')} GiB]" in page
    config = load_config(str(ROOT / "configs" / "qwen3_30b_a3b_v5p_4x4x4.py"))
    rollout = config.rollout_mesh
    for row in (
        f"| `mesh` (training) | `fsdp` {config.mesh.fsdp}, `expert` {config.mesh.expert} |",
        f"| `rollout_mesh` | `replica` {rollout.replica}, `expert` {rollout.expert},"
        f" `tensor` {rollout.tensor} |",
        f"| `rollout.slots` | {config.rollout.slots:,} |",
        f"| `rl.micro_batch_tokens` | {config.rl.micro_batch_tokens:,} |",
        f"| `compute` | {config.compute.dtype}, `remat` |",
    ):
        assert row in page


def test_a_plan_is_drawn_with_a_program_that_the_compiler_refused(tmp_path):
    plan = document("plans/qwen3_30b_a3b_v5p_4x4x4.json")
    for name, size in (("refused", 120.0), ("of unknown size", None)):
        plan["programs"][name] = {"memory_gib_per_chip": None, "gib_per_chip": size}
    plans.draw(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_math_verifys_pairs():
    results = document("math_pairs.json")
    right, pairs = results["right"], results["pairs"]
    assert right == results["math_verify_right"] == pairs - len(results["differ"])
    assert f"{right} of Math-Verify's {pairs} pairs" in README
    page = (DOCS / "equality.md").read_text()
    assert f"On the {pairs} pairs of Math-Verify's own tests" in page
    assert f"gives the expected score to {right}, as Math-Verify does" in page


def test_the_quickstart():
    results = document("quickstart.json")
    page = (DOCS / "quickstart.md").read_text()
    first, last = results["points"][0], results["points"][-1]
    start, end = (
        tuple(f"{100 * x[name]:.1f}" for name in ("avg_at_k", "avg_at_k_low", "avg_at_k_high"))
        for x in (first, last)
    )
    assert "from {}% (95% interval {} to {}) to {}% ({} to {})".format(*start, *end) in page
    assert f"from {100 * first['greedy']:.1f}% to {100 * last['greedy']:.1f}%" in page
    assert f"cold start solves {first['avg_at_k']:.0%} of these prompts" in README


def test_predictors():
    page = (DOCS / "howto" / "predictor.md").read_text()
    arms = {"text": "`text`", "state": "`state`", "labels": "`label`, with"}
    arms["one label"] = "`label`, one"
    for arm, name in arms.items():
        runs = [x for x in rows("unlabelled_predictors.jsonl") if x["arm"] == arm]
        runs.sort(key=lambda x: x["seed"])
        (line,) = [x for x in page.splitlines() if x.startswith(f"| {name}") and "%" in x]
        assert ", ".join(f"{x['log_loss']:.3f}" for x in runs) in line
        for size in ("coverage_90", "impossible_drawn"):
            assert ", ".join(f"{100 * x[size]:.0f}" for x in runs) + "%" in line
