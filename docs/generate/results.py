"""The tables of docs/results.md and README.md, from the raw files in benchmarks/results.

`python docs/generate/results.py` writes each table between its markers in a page,
`<!-- table: NAME -->` and `<!-- end -->`. NAME is a key of TABLES.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # for the folder benchmarks

from benchmarks import drafts, leaderboard, parity, tokens_report, unlabelled_report  # noqa: E402
from benchmarks.experiments import finished  # noqa: E402
from benchmarks.plans import PLANS  # noqa: E402
from benchmarks.rl_runs import by_variant  # noqa: E402

PAGES = (ROOT / "docs" / "results.md", ROOT / "README.md")
RAW = ROOT / "benchmarks" / "results"
GIB = 2**30
Rows = list[dict[str, Any]]
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Writes the pages with their tables."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))


def filled(text: str) -> str:
    """Returns the page with the tables of today's raw files."""
    return _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n\n{match[3]}", text)


def _rows(name: str) -> Rows:
    return finished(RAW / name)


def _document(name: str) -> dict[str, Any]:
    return json.loads((RAW / name).read_text())


def _table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown; `head` has the names of its columns, split by |."""
    columns = [name.strip() for name in head.split("|")]
    lines = [columns, *rows]
    text = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([text[0], "|" + "---|" * len(columns), *text[1:]])


def _range(values: tuple[float, float, float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*values)


def _three(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def without_labels() -> str:
    """Tabulates tokens and minutes to 90% of GRPO's gain on a file without labels."""
    runs, again = _rows("unlabelled_accuracy.jsonl"), _rows("unlabelled_again.jsonl")
    arms = [
        (runs, "hard", "candidate", "the recipe"),
        (again, "hard", "candidate", "the recipe, later code"),
        (again, "hard", "oracle", "selection by true rates"),
        (runs, "hard", "screening", "the recipe without selection"),
        (runs, "hard", "hard deleted", "GRPO, too hard prompts deleted by hand"),
        (again, "easy", "candidate", "the recipe where no prompt is too hard"),
    ]
    lines = []
    for rows, task, arm, name in arms:
        arm_runs = unlabelled_report.by_seed(rows, task, arm)
        cells = [name, str(len(arm_runs))]
        for cost in (0, 1):
            ratio = unlabelled_report.ratio(rows, task, arm, cost)
            assert ratio is not None
            text = "> " * bool(ratio.missed) + _range(ratio[:3])
            cells.append("" if (arm, cost) == ("oracle", 1) else text)
        ends = unlabelled_report.end_difference(rows, task, arm)
        cells.append("" if ends is None else f"{ends[0]:+.3f} ± {ends[1]:.3f}")
        cells.append(f"{mean(run['hard_drawn'] for run in arm_runs.values()):.0%}")
        lines.append(cells)
    return _table("arm | seeds | tokens | minutes | end, minus GRPO's | too hard drawn", lines)


def with_labels() -> str:
    """Tabulates tokens to 90% of GRPO's gain where labels mark the too hard prompts."""
    arms = {
        "screening, posterior, 2": "selection and screening",
        "posterior, target 0.5, discount 0.9": "selection",
        "screening, 4": "screening",
        "dapo": "DAPO",
    }
    runs = [
        run
        for run in _rows("tokens_to_accuracy.jsonl")
        if run["phase"] == "arms" and "16 x 4" in run["name"]
    ]
    lines = []
    for start, name in arms.items():
        pair = [x for x in runs if x["variant"] == "grpo" or x["name"].startswith(start)]
        variant = next(x["variant"] for x in pair if x["name"].startswith(start))
        ratios = tokens_report.ratios(pair)[variant]
        gaining = tokens_report.ratios([x for x in pair if x["seed"] != 3])[variant]
        cells = [_bound(ratios), _bound(gaining) if len(gaining) < len(ratios) else ""]
        lines.append([name, str(len(ratios)), *cells])
    return _table("arm | seeds | tokens | tokens, seed 3 left out", lines)


def _bound(ratios: list[tokens_report.Ratio]) -> str:
    """Returns a mean ratio and its interval, with > where a run never stayed at the target."""
    reached = all(ratio.reached for ratio in ratios)
    return "> " * (not reached) + _range(tokens_report.interval(ratios))


def word_problems() -> str:
    """Tabulates tokens and minutes of SmolLM2 on word problems."""
    arms = {
        "grpo": "GRPO",
        "posterior": "selection",
        "screening, posterior": "selection and screening",
    }
    runs = [x for x in _rows("tokens_elsewhere_words.jsonl") if x["phase"] == "arms"]
    tokens, minutes = tokens_report.ratios(runs), tokens_report.ratios(runs, minutes=True)
    lines = []
    for variant, name in arms.items():
        arm_runs = by_variant(runs)[variant]
        ends = (run["curve"][-1][2] for run in arm_runs)
        ratios = (_range(tokens_report.interval(x[variant])) for x in (tokens, minutes))
        lines.append([name, *ratios, _three(ends)])
    return _table("arm | tokens | minutes | accuracy at the end, seeds 0 and 1", lines)


def demo() -> str:
    """Tabulates the three seeds of the former demo, whose prompts had labels."""
    lines = []
    for seed in _document("demo_labelled.json")["seeds"]:
        grpo, own = seed["difference"]["first"], seed["difference"]["second"]
        accuracies = (seed["sft_avg_at_2"], own, grpo)
        ratio = f"{seed['to_target']['ratio']:.2f}"
        lines.append([str(seed["seed"]), ratio, *(f"{x:.3f}" for x in accuracies)])
    head = "seed | tokens | accuracy after SFT | after RL | after GRPO, as many tokens"
    return _table(head, lines)


def objectives() -> str:
    """Tabulates the accuracy of five objectives on three tasks."""
    runs = _rows("objectives.jsonl")
    lines = []
    for variant in ("espo", "gspo", "grpo", "dapo", "cispo"):
        variant_runs = [run for run in runs if run["variant"] == variant]
        ends = [
            [run["accuracy"] for run in variant_runs if run["task"] == task]
            for task in ("sums", "decisions", "noise")
        ]
        lines.append([variant.upper(), *(f"{mean(values):.3f}" for values in ends)])
    return _table("objective | `sums` | `decisions` | `noise`", lines)


def alpha() -> str:
    """Tabulates the accuracy at the end against ESPO's alpha."""
    runs = by_variant(_rows("alpha_outcome.jsonl"))
    places = [
        f"{task}, {size}"
        for task in ("decisions", "noise")
        for size in ("4 layers of 128", "2 layers of 64")
    ]
    lines = [
        [
            value,
            *(f"{mean(x['accuracy'] for x in runs[f'{place}, {value}']):.3f}" for place in places),
        ]
        for value in ("0.02", "0.1", "0.5")
    ]
    return _table("alpha | " + " | ".join(places), lines)


def zero_variance() -> str:
    """Tabulates accuracy and tokens of the zero-variance stages."""
    variants = {
        "grpo": "GRPO alone",
        "dapo": "DAPO's dynamic sampling",
        "all": "all stages",
        "grpo, half the prompts a step": "GRPO alone, half the prompts",
        "all, half the prompts a step": "all stages, half the prompts",
    }
    runs = by_variant(_rows("zero_variance.jsonl"))
    tokens = {variant: mean(x["tokens"] for x in runs[variant]) for variant in variants}
    lines = []
    for variant, name in variants.items():
        accuracy = mean(x["accuracy"] for x in runs[variant])
        without_signal = mean(x["shares"]["none"] for x in runs[variant])
        ratio = tokens[variant] / tokens["grpo"]
        lines.append([name, f"{accuracy:.3f}", f"{ratio:.2f}", f"{without_signal:.0%}"])
    return _table("stages | accuracy | tokens | tokens without a signal", lines)


def stages() -> str:
    """Tabulates runs in stages of rising difficulty and runs without."""
    runs = by_variant(_rows("stages.jsonl"))
    names = {"stages": "in stages", "shuffled": "as they come"}
    lines = [
        [
            name,
            _three(x["accuracy"] for x in runs[variant]),
            f"{mean(x['tokens'] for x in runs[variant]) / 1e3:.0f}",
        ]
        for variant, name in names.items()
    ]
    return _table("prompts | accuracy at the end, three seeds | thousand tokens", lines)


def drafted() -> str:
    """Tabulates tokens and time of rollouts with drafts."""
    lines = []
    for line in drafts.table(_rows("drafts.jsonl")).splitlines()[2:]:
        name, seeds, tokens, _, _, times, _, change = line.strip("| ").split(" | ")
        lines.append([name, seeds, tokens.split()[0], times.split()[0], change])
    return _table(
        "drafts | seeds | sampled tokens, times fewer | rollout time | accuracy minus without",
        lines,
    )


def replay() -> str:
    """Tabulates the log-prob gap between rollout and training, without and with R3."""
    lines = []
    models = {"": "MoE, 6.6M", "_smollm2": "SmolLM2, upcycled"}
    for file, model in models.items():
        runs = by_variant(_rows(f"router_replay{file}.jsonl"))
        for variant in ("bf16", "int8", "e4m3"):
            gaps = [_gaps(run) for run in runs.get(variant, ())]
            if gaps:
                off, r3 = (mean(gap[mode] for gap in gaps) for mode in ("off", "R3"))
                ratio = mean(gap["off"] / gap["R3"] for gap in gaps)
                lines.append([model, variant, f"{off:.1e}", f"{r3:.1e}", f"{ratio:.1f}"])
    return _table("model | rollout | gap, off | gap, R3 | times smaller", lines)


def _gaps(run: dict[str, Any]) -> dict[str, float]:
    """Returns the mean log-prob gap in nats before any update, by mode of replay."""
    points = [point for point in run["points"] if point["updates"] == 0]
    return {point["mode"]: point["recorded"]["logp_abs_diff"] for point in points}


def recipes() -> str:
    """Tabulates recipes without labels, the fewest tokens first."""
    rows, lines = _rows("unlabelled_accuracy.jsonl"), []
    names = {
        unlabelled_report.BASELINE: "GRPO, tuned",
        "candidate": "selection by text, screening, cosine",
    }
    for arm, name in names.items():
        runs = unlabelled_report.by_seed(rows, "hard", arm)
        ratios = [unlabelled_report.ratio(rows, "hard", arm, cost) for cost in (0, 1)]
        costs = [("> " if x.missed else "") + _range(x[:3]) for x in ratios if x is not None]
        seeds, commit = str(len(runs)), next(iter(runs.values()))["commit"][:8]
        line = [name, *(["1", "1"] if arm == unlabelled_report.BASELINE else costs), seeds, commit]
        lines.append((ratios[0], line))
    lines += [
        (
            unlabelled_report.Ratio(*row["tokens"]),
            [
                row["recipe"],
                *(_range(row[cost][:3]) for cost in ("tokens", "minutes")),
                str(len(leaderboard.SEEDS)),
                row["commit"][:8],
            ],
        )
        for row in _rows("leaderboard.jsonl")
    ]
    return _table("recipe | tokens | minutes | seeds | commit", [x for _, x in sorted(lines)])


def trl_parity() -> str:
    """Tabulates what GRPO learns here and in TRL in as many steps."""
    gaps = parity.difference(_rows("parity.jsonl"), "moe")
    assert gaps is not None
    sizes = gaps["avg_at_4"], gaps["reward"]
    lines = [
        [name, str(gaps["seeds"][place]), *(f"{size[side]:.3f}" for size in sizes)]
        for place, (side, name) in enumerate((("ours", "compass_jax"), ("trl", "TRL")))
    ]
    cells = [
        f"{size['ours'] - size['trl']:+.3f} ({size['low']:.3f} to {size['high']:.3f})"
        for size in sizes
    ]
    lines.append(["difference, 95% interval", "", *cells])
    return _table("GRPO | seeds | avg@4 | mean reward of all steps", lines)


def trl_speed() -> str:
    """Tabulates a whole GRPO step beside TRL's."""
    models = {"moe": "MoE, 13.5M", "smollm2": "SmolLM2-135M"}
    columns = []
    for model in models:
        speeds = [x for x in _rows("against_trl.jsonl") if model in x][-1][model]
        for side in ("ours", "trl"):
            sizes = [speeds[f"{side}_{x}"] for x in ("step_s", "rollout_s", "peak_gib", "tokens")]
            rate = speeds[f"{side}_step_s"] / speeds[f"{side}_tokens"]
            ours = speeds["ours_step_s"] / speeds["ours_tokens"]
            cells = [f"{size:.1f}" for size in sizes[:3]] + [f"{sizes[3]:.0f}"]
            columns.append([*cells, f"{rate / ours:.2f}"])
    names = ("a step, s", "of it generation, s", "peak, GiB", "tokens an answer")
    names += ("seconds a token over ours",)
    lines = [[name, *cells] for name, *cells in zip(names, *columns, strict=True)]
    return _table("GRPO | " + " | ".join(f"{x} | TRL" for x in models.values()), lines)


def transformers_speed() -> str:
    """Tabulates tokens a second beside transformers."""
    names = {
        "train": "training step, 16 x 128 tokens",
        "rollout": "generation, 64 prompts",
        "long_tail": "generation, 1,024 requests on 64 slots",
    }
    lines = []
    for name, label in names.items():
        speeds = _document(f"{name}.json")
        cells = [f"{speeds[f'{x}_tokens_per_s']:,.0f}" for x in ("ours", "transformers")]
        lines.append([label, *cells, f"{speeds['ratio']:.2f}"])
    return _table("tokens/s | compass_jax | transformers | ratio", lines)


def overlap() -> str:
    """Tabulates the time of a step as parts of it overlap, each row with those above it."""
    names = (
        ("base", "nothing overlaps"),
        ("+ detokenisation", "detokenisation during decoding"),
        ("+ reward overlap", "rewards during decoding"),
        ("+ 8-bit rollout", "8-bit rollout, emulated"),
        ("+ longest first", "longest first"),
        ("+ one step off", "one step off policy"),
        ("+ partial rollouts", "partial rollouts"),
    )
    seconds = {x["variant"]: x["step_s"] for x in _document("measures.json")["rows"]}
    return _table("added | step, s", [[name, f"{seconds[key]:.2f}"] for key, name in names])


def judges() -> str:
    """Tabulates what a policy learns from a judge and from a scalar reward model."""
    runs = by_variant(_rows("inversion.jsonl"))
    names = {"gold": "the gold label"}
    lines = [
        [
            names.get(variant, variant),
            f"{mean(x['accuracy'] for x in variant_runs):.3f}",
            f"{mean(x['inversion'] for x in variant_runs):.1%}",
        ]
        for variant, variant_runs in runs.items()
    ]
    return _table("reward | accuracy after RL | inverted pairs", lines)


def turns() -> str:
    """Tabulates the success of conversations by their number of calls."""
    runs = by_variant(_rows("turns.jsonl"))
    lines = []
    for calls in (1, 2, 4, 8):
        end = runs[f"{calls}, end, no stages"]
        each = runs.get(f"{calls}, each turn, no stages", [])
        before = f"{mean(x['start'] for x in end):.2f}"
        after = [f"{mean(x['accuracy'] for x in y):.2f}" if y else "" for y in (end, each)]
        lines.append([str(calls), before, *after])
    return _table("calls | before | after, reward at the end | after, reward each turn", lines)


def pipeline() -> str:
    """Tabulates the accuracies of a pipeline's stages."""
    names = {
        "base": "base",
        "merged": "two parents, merged",
        "rl-reasoning": "RL 1, by a verifier",
        "rl-domain": "RL 2, by a judge",
    }
    runs = _document("pipeline_judge.json")["stages"]
    lines = [
        [name, *(f"{runs[stage][task]['avg_at_k']:.1%}" for task in ("reasoning", "domain"))]
        for stage, name in names.items()
    ]
    return _table("stage | reasoning | domain", lines)


def pods() -> str:
    """Tabulates the memory of the fullest program of each pod configuration."""
    lines = []
    for name in PLANS:
        plan = _document(f"plans/{name}.json")
        sizes = (plan["hbm_gib_per_chip"], plan["hbm_limit_gib"])
        chips = plan["devices"] // plan["devices_per_chip"]
        lines.append([f"`{name}`", str(chips), *(f"{size:.1f}" for size in sizes)])
    return _table("configuration | chips | GiB a chip | usable", lines)


def gpu() -> str:
    """Tabulates decoding and training on a GPU."""
    runs = _rows("gpu.jsonl")
    decode, train = (next(x[key] for x in runs if key in x) for key in ("decode", "train"))
    slots = decode["128 slots"]
    lines = [
        ["decoding, whole model, 128 slots, tokens/s", f"{slots['tokens_per_s']:,.0f}"],
        ["of the card's memory bandwidth", f"{slots['of_bandwidth']:.0%}"],
        ["memory while decoding, GiB", f"{decode['peak_gib']:.1f}"],
        [f"training, {train['layers']} layers, tokens/s", f"{train['tokens_per_s']:,.0f}"],
        ["MFU in training", f"{train['mfu']:.1%}"],
    ]
    return _table("Qwen3-30B-A3B, random weights | one H100", lines)


def costs() -> str:
    """Tabulates what data, packed rows, saves and merges cost."""
    stream, packed = _document("streaming.json"), _document("packing.json")
    memory, save = stream["memory_mib_after_batches"], _document("checkpoint.json")
    duplicates, ties = _document("near_duplicates.json"), _document("merge.json")["merges"][0]
    usual = duplicates["thresholds"]["0.7"]
    starts = (f"{stream[f'{name}_start_s']:.1f}" for name in ("first", "second"))
    speeds = (packed[rows]["tokens_per_s"] for rows in ("apart", "packed"))
    paddings = (f"{packed[rows]['padding_frac']:.0%}" for rows in ("apart", "packed"))
    lines = [
        ["SFT on a file of 5 GiB: first start; later ones", f"{'; '.join(starts)} s"],
        ["memory after 10 batches; after 500", f"{memory['10']}; {memory['500']} MiB"],
        ["SFT rows apart; packed: padding", "; ".join(paddings)],
        ["real tokens a second", "; ".join(f"{speed:,.0f}" for speed in speeds)],
        ["near duplicates at 0.7: precision", f"{usual['precision']:.3f}"],
        ["recall after three changed words", f"{usual['recall_of']['three words']:.3f}"],
        ["a save of 2 GiB blocks training for", f"{save['background']:.3f} s"],
        ["a step; beside a save", f"{save['step']:.2f}; {save['step_beside_a_save']:.1f} s"],
        ["merging two models of 2 GiB by TIES: peak", f"{ties['peak_bytes'] / GIB:.2f} GiB"],
    ]
    return _table("what | measured", lines)


TABLES = {
    "without_labels": without_labels,
    "with_labels": with_labels,
    "word_problems": word_problems,
    "demo": demo,
    "objectives": objectives,
    "alpha": alpha,
    "zero_variance": zero_variance,
    "stages": stages,
    "drafts": drafted,
    "replay": replay,
    "trl_parity": trl_parity,
    "trl_speed": trl_speed,
    "transformers_speed": transformers_speed,
    "overlap": overlap,
    "judges": judges,
    "turns": turns,
    "pipeline": pipeline,
    "pods": pods,
    "gpu": gpu,
    "costs": costs,
    "recipes": recipes,
}

if __name__ == "__main__":
    main()
