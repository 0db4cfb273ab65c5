"""The numbers of README.md and docs/measurements.md are those of the raw files."""

import json
import re
from pathlib import Path
from statistics import mean, median

import pytest

from benchmarks import drafts, parity, plans, unlabelled_report
from benchmarks.targets import means_of_evaluations
from benchmarks.tokens_report import interval, over_window, ratios

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "measurements.md").read_text()


def rows(name):
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def test_router_replay():
    ratios = []
    for seed in range(3):
        points = [
            p
            for r in rows("router_replay.jsonl")
            if r["variant"] == "bf16" and r["seed"] == seed and "points" in r
            for p in r["points"]
            if p["updates"] == 0
        ]
        gap = {p["mode"]: p["recorded"]["logp_abs_diff"] for p in points}
        ratios.append(gap["off"] / gap["R3"])
    assert f"{mean(ratios):.1f} times smaller" in PAGE


def test_parity_with_trl():
    found = parity.difference(rows("parity.jsonl"), "moe")
    section = PAGE.split("python -m benchmarks.parity")[1].split("\n\nThe orders")[0]
    accuracy, reward = found["avg_at_4"], found["reward"]
    for side, name in (("ours", "ours"), ("trl", "TRL")):
        assert f"| {name} | 8 | {accuracy[side]:.3f} | {reward[side]:.3f} |" in section
    for of in (accuracy, reward):
        gap = of["ours"] - of["trl"]
        assert f"{gap:+.3f} ({of['low']:.3f} to {of['high']:.3f})" in section
    assert found["seeds"] == [8, 8]


def test_predictors():
    """The table of docs/howto/predictor.md, seeds 200 and 201."""
    page = (ROOT / "docs" / "howto" / "predictor.md").read_text()
    arms = {"text": "`text`", "state": "`state`", "labels": "`label`, with"}
    arms["one label"] = "`label`, one"
    for arm, name in arms.items():
        runs = sorted(
            (r for r in rows("unlabelled_predictors.jsonl") if r["arm"] == arm),
            key=lambda r: r["seed"],
        )
        (line,) = [x for x in page.splitlines() if x.startswith(f"| {name}") and "%" in x]
        assert ", ".join(f"{r['log_loss']:.3f}" for r in runs) in line
        for size in ("coverage_90", "impossible_drawn"):
            assert ", ".join(f"{100 * r[size]:.0f}" for r in runs) + "%" in line


STAGES = {
    "GRPO alone": "grpo",
    "DAPO's dynamic sampling": "dapo",
    "all stages": "all",
    "GRPO alone, half the prompts": "grpo, half the prompts a step",
    "all stages, half the prompts": "all, half the prompts a step",
}


def of_variant(name):
    return [r for r in rows("zero_variance.jsonl") if r["variant"] == name]


@pytest.mark.parametrize("label", STAGES)
def test_stages(label):
    runs = of_variant(STAGES[label])
    assert {r["seed"] for r in runs} == {0, 1, 2}
    shares = [mean(r["shares"][s] for r in runs) for s in runs[0]["shares"]]
    assert list(runs[0]["shares"]) == [
        "verifier_signal",
        "shaping_signal",
        "entropy_signal",
        "none",
    ]
    cells = [f"{x:.1%}".replace("0.0%", "0%") if x < 0.0005 else f"{x:.1%}" for x in shares]
    accuracy, tokens = mean(r["accuracy"] for r in runs), mean(r["tokens"] for r in runs)
    line = f"| {label} | {accuracy:.3f} | {tokens / 1000:.0f} | {' | '.join(cells)} |"
    assert line in PAGE


def test_tokens_of_the_stages():
    every, plain = of_variant("all"), of_variant("grpo")
    ratio = mean(r["tokens"] for r in every) / mean(r["tokens"] for r in plain)
    no_signal = [mean(r["shares"]["none"] for r in runs) for runs in (plain, every)]
    assert f"{ratio:.2f} times GRPO's tokens" in PAGE
    assert no_signal[1] < 0.2 * no_signal[0]
    weak = [0.1 * mean(r["series"]["entropy_nats"]) for r in every]
    assert 100 < 1 / max(weak) < 1 / min(weak) < 400  # "about 200 times weaker"


UNIFORM = {
    "GRPO alone": "grpo",
    "filter, selection, growth, shaping": "filter+select+grow+shaping",
    "with RL-ZVP (all stages)": "all",
    "with a curriculum": "curriculum in place of RL-ZVP",
    "with a second verifier": "ensemble in place of RL-ZVP",
}


def spread(values):
    return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def uniform_groups(variant):
    runs = [r for r in rows("uniform_groups.jsonl") if r["variant"] == variant]
    assert sorted(r["seed"] for r in runs) == [0, 1, 2]
    return runs


def test_growth_at_a_higher_temperature():
    runs = uniform_groups("hotter growth in place of RL-ZVP")
    share = mean(r["shares"]["verifier_signal"] for r in runs)
    assert f"gave {share:.1%} of the tokens the verifier's signal" in PAGE
    assert f"the same accuracy, {spread([r['accuracy'] for r in runs])}, and was left out" in PAGE


@pytest.mark.parametrize("label", UNIFORM)
def test_what_stands_in_for_rl_zvp(label):
    runs = uniform_groups(UNIFORM[label])
    shares = [
        mean(r["shares"][name] for r in runs)
        for name in ("verifier_signal", "shaping_signal", "entropy_signal", "none")
    ]
    cells = [spread([r["accuracy"] for r in runs]), f"{mean(r['tokens'] for r in runs) / 1e3:.0f}"]
    cells += [f"{x:.1%}" if x else "0%" for x in shares]
    assert f"| {label} | {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize(
    ("label", "variant"), [("in stages", "stages"), ("as they come", "shuffled")]
)
def test_stages_of_rising_difficulty(label, variant):
    runs = [r for r in rows("stages.jsonl") if r["variant"] == variant]
    ends = ", ".join(f"{r['accuracy']:.3f}" for r in sorted(runs, key=lambda r: r["seed"]))
    tokens, signal = (
        mean(r["tokens"] for r in runs) / 1e3,
        mean(r["shares"]["verifier_signal"] for r in runs),
    )
    row = re.search(rf"^\| {label} \| .* \| {ends} \| (\d+) \| (\d+)% \|$", PAGE, re.MULTILINE)
    assert [int(x) for x in row.groups()] == [round(tokens), round(100 * signal)]


@pytest.mark.parametrize("alpha", ["0.005", "0.02", "0.1", "0.5"])
def test_alpha_against_accuracy(alpha):
    cells = []
    for task in ("decisions", "noise"):
        for size in ("4 layers of 128", "2 layers of 64"):
            name = f"{task}, {size}, {alpha}"
            runs = [r for r in rows("alpha_outcome.jsonl") if r["variant"] == name]
            assert len(runs) == 3
            cells.append(f"{mean(r['accuracy'] for r in runs):.3f}")
    row = re.search(rf"^\| {re.escape(alpha)} \| (.* \(.*\)) \|$", PAGE, re.MULTILINE)[1]
    assert [cell.split(" (")[0] for cell in row.split(" | ")] == cells


NAMES = {
    "ESPO": "espo",
    "GSPO": "gspo",
    "GRPO": "grpo",
    "DAPO": "dapo",
    "CISPO": "cispo",
}


@pytest.mark.parametrize("label", NAMES)
def test_objectives(label):
    cells = []
    for task in ("sums", "decisions", "noise"):
        runs = [
            r for r in rows("objectives.jsonl") if (r["task"], r["variant"]) == (task, NAMES[label])
        ]
        curves = [mean(y for _, y in r["curve"]) for r in runs]
        assert len(runs) == 3
        cells.append((mean(r["accuracy"] for r in runs), mean(curves)))
    row = re.search(rf"^\| {label} \| (.*) \|$", PAGE, re.MULTILINE)[1].split(" | ")
    for cell, (end, _) in zip(row, cells, strict=True):
        assert cell.startswith(f"{end:.3f} (")
    if label == "ESPO":
        assert f"task at one size ({cells[1][0]:.2f})" in README


def test_speed():
    for name in ("train", "rollout", "long_tail"):
        speeds = json.loads((RESULTS / f"{name}.json").read_text())
        line = (
            f"| {speeds['ours_tokens_per_s']:,.0f} | {speeds['transformers_tokens_per_s']:,.0f} |"
        )
        assert line in PAGE


def test_plans():
    for file in (RESULTS / "plans").glob("*.json"):
        plan = json.loads(file.read_text())
        cell = rf"\| `{file.stem}` \| \d+ \| ([\d.]+) in .* \(([\d.]+)\) \|"
        needed, usable = re.search(cell, PAGE).groups()
        assert (needed, usable) == (
            f"{plan['hbm_gib_per_chip']:.1f}",
            f"{plan['hbm_limit_gib']:.1f}",
        )
    assert "needs 68.7 GiB of 92.2" in README


def test_a_plan_is_drawn_with_a_program_that_the_compiler_refused(tmp_path):
    plan = json.loads((RESULTS / "plans" / "qwen3_30b_a3b_v5p_4x4x4.json").read_text())
    for name, size in (("refused", 120.0), ("of unknown size", None)):
        plan["programs"][name] = {"memory_gib_per_chip": None, "gib_per_chip": size}
    plans.draw(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_pod_programs():
    measurements = rows("pod_programs.jsonl")
    for change in {row["change"] for row in measurements}:
        programs = [row for row in measurements if row["change"] == change]
        start = f"| {change} | {programs[0]['commit']} |"
        line = next(line for line in PAGE.splitlines() if line.startswith(start))
        cells = line.split("|")
        for row in programs:
            assert f" {row['estimated_ms']:,.0f} " in cells
        if len(programs) == 1:  # a backward pass alone
            assert line.endswith(f"| {programs[0]['temporary_gib']:.2f} |")


def test_drafts():
    for line in drafts.table(rows("drafts.jsonl")).splitlines():
        assert line in PAGE


def test_measures():
    for row in json.loads((RESULTS / "measures.json").read_text())["rows"][:7]:
        assert f"| {row['step_s']:.2f} |" in PAGE, row["variant"]


def difference_in_words(paired):
    """Returns the sentence of these demos on a paired difference, in percentage points."""
    points, low, high = (100 * x for x in (paired["difference"], *paired["interval"]))
    side = "above" if points > 0 else "below"
    sentence = (
        f"{abs(points):.1f} points {side} plain GRPO's (95% interval of the difference:"
        f" {low:+.1f} to {high:+.1f}, {paired['prompts']} prompts, one seed)"
    )
    return sentence + (": these prompts show no difference" if low <= 0 <= high else "")


def test_the_demo():
    results = json.loads((RESULTS / "demo.json").read_text())
    part = PAGE[PAGE.index("## The demo") :].split("\n### ")[0]
    assert results["commit"] in part and f"{results['machine']['cores']} cores" in part
    lines = part.splitlines()
    for place, seed in enumerate(results["seeds"]):
        assert seed["seed"] == place
        for label, row in seed["by_difficulty"].items():
            name = "all tasks" if label == "all" else label
            names = ("SFT avg@2", "RL avg@2", "SFT greedy", "RL greedy")
            line = next(x for x in lines if x.startswith(f"| {name} |"))
            cells = [x.strip() for x in line.strip("|").split("|")]
            assert cells[1 + 4 * place :][:4] == [f"{row[x]:.3f}" for x in names]
        rows = {row.pop(""): tuple(row.values()) for row in seed["against_grpo"]}
        for name, cells in rows.items():
            assert " | ".join(cells) in next(x for x in lines if x.startswith(f"| {name} |"))
        our_tokens, grpo_tokens = (int(x.replace(",", "")) for x in rows["generated tokens"])
        assert our_tokens <= grpo_tokens < 1.05 * our_tokens
        costs = seed["to_target"]
        assert costs["reached"] and f"{costs['ratio']:.2f} (seed {place})" in part
        assert f"{costs['tokens']:,.0f} instead of {costs['baseline_tokens']:,.0f}" in part
        sentence = difference_in_words(seed["difference"])
        assert f"{sentence} on seed {place}" in part
    ratio = median(seed["to_target"]["ratio"] for seed in results["seeds"])
    assert f"{ratio:.2f} of its tokens" in README


def test_tokens_to_an_accuracy():
    """README and the page give the ratios of two arms by both measures, with and without seed 3."""
    arms = [x for x in rows("tokens_to_accuracy.jsonl") if x["phase"] == "arms"]
    arms = [x for x in arms if "16 x 4" in x["name"]]
    for name, texts in {
        "screening, posterior, 2 of 4": (
            ("0.26 (0.14 to 0.38)", "0.27 (0.11 to 0.46)"),
            ("0.36 (0.32 to 0.39)", "0.41 (0.36 to 0.48)"),
        ),
        "posterior, target 0.5, discount 0.9": (
            ("0.42 (0.24 to 0.59)", "0.39 (0.20 to 0.59)"),
            ("0.55 (0.50 to 0.61)", "0.54 (0.47 to 0.62)"),
        ),
    }.items():
        pair = [x for x in arms if x["variant"] == "grpo" or x["name"].startswith(name + ", 16")]
        variant = next(x["variant"] for x in pair if x["variant"] != "grpo")
        for left_out, of_measures in zip(((), (3,)), texts, strict=True):
            seeds = [x for x in pair if x["seed"] not in left_out]
            for smooth, text in zip((means_of_evaluations, over_window), of_measures, strict=True):
                ratio, low, high = interval(ratios(seeds, smooth=smooth)[variant])
                assert f"{ratio:.2f} ({low:.2f} to {high:.2f})" == text
                assert text.rstrip(")") in PAGE
    again = rows("tokens_to_accuracy_minutes.jsonl")
    first = {(x["variant"], x["seed"]): x["curve"] for x in arms if "0.7, 16" not in x["name"]}
    for run in again:  # the same tokens and accuracies
        of_first = [point[::2] for point in first[run["variant"], run["seed"]]]
        assert [point[::2] for point in run["curve"]] == of_first
    for left_out, text in (((), "0.73 (0.49 to 0.95)"), ((3,), "0.89 (0.79 to 0.99)")):
        seeds = [x for x in again if x["seed"] not in left_out]
        ratio, low, high = interval(ratios(seeds, minutes=True)["screening, posterior"])
        assert f"{ratio:.2f} ({low:.2f} to {high:.2f})" == text and text in PAGE


def test_tokens_without_labels():
    found = rows("unlabelled_accuracy.jsonl")
    section = PAGE.split("### Without labels")[1].split("### A pretrained model")[0]
    (table,) = [x for x in unlabelled_report.report(found).split("\n\n") if "| candidate" in x]
    assert table in section
    ratio = unlabelled_report.ratio(found, "hard", "candidate", 0)
    text = f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    assert f"needs {text} of tuned GRPO's tokens" in section
    assert f"{ratio.mean:.2f} of tuned GRPO's tokens" in README
    difference, error = unlabelled_report.end_difference(found, "hard", "candidate")
    assert f"ends {difference:.3f} higher (standard error {error:.3f})" in section
    base, runs = (unlabelled_report.by_seed(found, "hard", x) for x in ("grpo", "candidate"))
    assert sorted(base) == sorted(runs) == list(range(310, 320))
    for cost, seeds in ((0, range(310, 320)), (1, (310, 311, 318, 319))):
        pairs = [
            [unlabelled_report.passage(x[s], base[s], cost)[0] for x in (runs, base)] for s in seeds
        ]
        texts = [f"{own / other:.2f}" for own, other in pairs]
        assert f"{', '.join(texts[:-1])} and {texts[-1]}" in section


def test_tokens_to_an_accuracy_on_word_problems():
    arms = [x for x in rows("tokens_elsewhere_words.jsonl") if x["phase"] == "arms"]
    part = PAGE[PAGE.index("### A pretrained model on word problems") :].split("The first att")[0]
    lines = [x.strip("| ").split(" | ") for x in part.splitlines() if x.startswith("| ")][1:]
    of_seed = [[x for x in arms if x["seed"] == seed] for seed in (0, 1)]
    variants = [
        (seed, name) for seed in (0, 1) for name in dict.fromkeys(x["variant"] for x in arms)
    ]
    assert len(lines) == len(variants) == len(arms)
    for line, (seed, variant) in zip(lines, variants, strict=True):
        kinds = ({}, {"smooth": over_window}, {"minutes": True})
        costs = [ratios(of_seed[seed], **kind)[variant][0] for kind in kinds]
        run = next(x for x in of_seed[seed] if x["variant"] == variant)
        assert line[1] == str(seed) and all(cost.reached for cost in costs)
        assert line[2:5] == [f"{cost.cost:.2f}" for cost in costs]
        ends = f"{run['curve'][0][2]:.3f}, {run['curve'][-1][2]:.3f}"
        assert line[5:] == [ends, f"{run['uniform_frac']:.0%}"]
    for variant in ("screening, posterior", "posterior"):
        ratio, low, high = interval(ratios(arms)[variant])
        assert f"{ratio:.2f} ({low:.2f} to {high:.2f})" in part
    assert "0.36 of GRPO's tokens" in README


def test_the_former_demo():
    results = json.loads((RESULTS / "demo_former.json").read_text())
    part = PAGE[PAGE.index("### The former demo") :].split("\n### ")[0]
    assert results["commit"] in part
    for label, row in results["by_difficulty"].items():
        name = "all tasks" if label == "all" else label
        cells = (row[x] for x in ("SFT avg@4", "RL avg@4", "SFT greedy", "RL greedy"))
        assert f"| {name} | {' | '.join(f'{x:.3f}' for x in cells)} |" in part
    rows = {row.pop(""): tuple(row.values()) for row in results["against_grpo"]}
    for name, cells in rows.items():
        assert f"| {name} | {' | '.join(cells)} |" in part
    sentence = difference_in_words(results["difference"])
    assert sentence.split(" (")[0] in part


def test_the_demo_with_a_recorded_baseline():
    part = PAGE[PAGE.index("### The same with a recorded baseline") :].split("\n## ")[0]
    for seed in (0, 1):
        results = json.loads((RESULTS / f"demo_seed{seed}.json").read_text())
        line = next(x for x in part.splitlines() if x.startswith("| all tasks"))
        assert f"{results['sft_avg_at_4']:.3f} | {results['rl_avg_at_4']:.3f}" in line
        assert results["commit"][:7] in part and f"{results['espo_floor_token_frac']:.0%}" in PAGE
        assert results["rl_avg_at_4"] - results["sft_avg_at_4"] >= 0.3
        rows = {row.pop(""): tuple(row.values()) for row in results["against_grpo"]}
        for name, cells in rows.items():
            line = next(x for x in part.splitlines() if x.startswith(f"| {name} |"))
            assert " | ".join(cells) in line
        our_tokens, grpo_tokens = (int(x.replace(",", "")) for x in rows["generated tokens"])
        assert our_tokens <= grpo_tokens < 1.05 * our_tokens


def test_the_quickstart():
    results = json.loads((RESULTS / "quickstart.json").read_text())
    page = (ROOT / "docs" / "quickstart.md").read_text()
    first, last = results["points"][0], results["points"][-1]
    assert (first["step"], last["step"], results["k"]) == (0, 20, 4)

    def percentage(point, name):
        return f"{100 * point[name]:.1f}"

    start, end = (
        (percentage(x, "avg_at_k"), percentage(x, "avg_at_k_low"), percentage(x, "avg_at_k_high"))
        for x in (first, last)
    )
    assert "from {}% (95% interval {} to {}) to {}% ({} to {})".format(*start, *end) in page
    assert f"from {100 * first['greedy']:.1f}% to {100 * last['greedy']:.1f}%" in page
    assert f"on {results['prompts']} prompts" in page


def test_near_duplicates():
    results = json.loads((RESULTS / "near_duplicates.json").read_text())
    measured = {**results["thresholds"], "0.7, numbers not compared": results["without_numbers"]}
    for name, one in measured.items():
        shares = (one["precision"], one["recall"], one["recall_of"]["three words"])
        assert f"| {name} | {' | '.join(f'{share:.3f}' for share in shares)} |" in PAGE
    usual, cost = results["thresholds"]["0.7"], results["cost"]
    assert set(usual["recall_of"].values()) == {1.0} and results["command"] in PAGE
    assert f"{usual['rows']:,} rows" in PAGE and f"{usual['near_duplicates']:,} of them" in PAGE
    assert round(1 / (1 - results["without_numbers"]["precision"])) == 14
    assert f"took {cost['processor_s']:.0f} seconds of processor" in PAGE
    assert f"{cost['peak_mib'] / 1024:.2f} GiB at the peak" in PAGE
    assert f"{cost['bytes_a_kept_row'] / 1000:.1f} kB for each kept row" in PAGE
    assert f"({cost['bytes'] / 1e6:.0f} MB, {cost['kept'] / 1000:.0f} thousand" in PAGE
    assert f"The clock said {cost['wall_s'] / 60:.0f} minutes" in PAGE


def test_measurements_of_files_larger_than_memory():
    results = json.loads((RESULTS / "streaming.json").read_text())
    part = PAGE[PAGE.index("## Files larger than memory") :].split("\n## ")[0]
    assert f"{results['rows']:,} rows" in part and f"has {results['index_mib']} MiB" in part
    for name in ("first_start", "second_start"):
        assert (
            f"{results[f'{name}_s']:.1f} s" in part and f"{results[f'{name}_cpu_s']:.1f} s" in part
        )
    assert f"| {results['batch_ms']:.0f} ms |" in part
    memory = results["memory_mib_after_batches"]
    for batches in ("10", "250", "500"):
        assert f"{memory[batches]} MiB" in part and batches in part
    assert all(one["same_batches"] for one in results["goes_on_by_processes"].values())
    page = (ROOT / "docs" / "data.md").read_text()
    assert f"{memory['10']:.0f} MiB after 10 batches" in page
    assert f"{memory['500']:.0f} MiB after 500" in page
    for name, one in results["formats"].items():
        assert f"`{name.removeprefix('rows')}` {one['open_cpu_s']:.1f}" in part


def test_merging():
    results = json.loads((RESULTS / "merge.json").read_text())
    assert results["model_bytes"] > 2 * 2**30 and results["commit"].startswith("e517f73")
    for row in results["merges"]:
        cells = f"{row['peak_bytes'] / 2**30:.2f} | {row['cpu_seconds']:.0f} | {row['seconds']:.0f}"
        assert f"| {row['method']} | {cells} |" in PAGE
        assert row["peak_bytes"] < 1.5 * 2**30


def test_math_verifys_pairs():
    results = json.loads((RESULTS / "math_pairs.json").read_text())
    right, pairs = results["right"], results["pairs"]
    assert right == results["math_verify_right"] == pairs - len(results["differ"])
    assert f"{right} of Math-Verify's {pairs} pairs" in (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "equality.md").read_text()
    assert f"On the {pairs} pairs of Math-Verify's own tests" in page
    assert f"gives the expected score to {right}, as Math-Verify does" in page
