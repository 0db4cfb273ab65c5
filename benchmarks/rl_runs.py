"""Shared parts of the RL experiments: a run as one row (accuracy against tokens, where the signal
came from), rows as a table and a picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiments
from compass_jax.commands.configured import load_config
from compass_jax.config import RunConfig, ShapingConfig, ZeroVarianceConfig, named_correction
from compass_jax.experience.evaluate import evaluate_weights
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "tiny_reasoning_cpu.py"
SIGNALS = ("verifier_signal", "shaping_signal", "entropy_signal", "none")
SERIES = (
    "policy/clip_frac",
    "entropy_nats",
    "reward/mean",
    "response_length/mean",
    "zero_variance/rate_all_right",
    "zero_variance/rate_all_wrong",
)
# the palette of Okabe and Ito
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")


def parser(
    doc: str,
    out: str = "",
    *,
    cold_starts: str = "",
    seeds: Sequence[int] = (),
    variants: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Returns a parser of the options that experiments share: --smoke, and those of --out and
    --cold-starts (folders of runs/), --seeds and --only that the caller names.
    """
    argument_parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    if out:
        argument_parser.add_argument(
            "--out",
            default=f"runs/{out}",
            help="directory of the runs and the results (default: %(default)s)",
        )
    if cold_starts:
        argument_parser.add_argument(
            "--cold-starts",
            default=f"runs/{cold_starts}",
            help="cold starts that experiments share (default: %(default)s)",
        )
    if seeds:
        argument_parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    if variants:
        helps = f"some of {', '.join(variants)}"
        argument_parser.add_argument(
            "--only",
            nargs="+",
            choices=list(variants),
            default=list(variants),
            metavar="VARIANT",
            help=helps,
        )
    argument_parser.add_argument(
        "--smoke",
        action="store_true",
        help="a version of minutes: it shows that everything runs, not what it is worth",
    )
    return argument_parser


def without_stages() -> RunConfig:
    """Returns configs/tiny_reasoning_cpu.py with 64 prompts a step and RL-ZVP alone, as in older
    measurements.
    """
    config = load_config(str(CONFIG))
    rl = dataclasses.replace(
        config.rl,
        prompts_per_step=64,
        correction=named_correction("off"),
        shaping=ShapingConfig(),
        zero_variance=ZeroVarianceConfig(rl_zvp=True),
    )
    return dataclasses.replace(config, rl=rl)


def cold_start(seed: int, folder: Path) -> str:
    """Trains the cold start of configs/tiny_reasoning_cpu.py with this seed, once for all
    experiments that start from it; returns its directory.
    """
    config = dataclasses.replace(
        load_config(str(CONFIG)), seed=seed, run_dir=str(folder / f"seed{seed}")
    )
    run_sft(config)
    return config.directory


def start_accuracy(config: RunConfig, weights: str, folder: Path) -> float:
    """Returns the held-out accuracy of the cold start, measured once and stored in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "start.json"
    if not file.exists():
        write_atomically(file, json.dumps({"accuracy": evaluate_weights(config, weights).avg_at_k}))
    return json.loads(file.read_text())["accuracy"]


def run(config: RunConfig, start_accuracy: float, variant: str) -> dict[str, Any]:
    """Trains `config`, or resumes its training, and returns its row. Held-out accuracy is avg@k, at
    0 tokens that of the start.
    """
    started = time.perf_counter()
    final = run_rl(config)["evaluation"]
    rows = [
        json.loads(line)["metrics"]
        for line in (Path(config.directory) / "metrics.jsonl").read_text().splitlines()
    ]
    row = {
        "variant": variant,
        "seed": config.seed,
        "hash": experiments.config_hash(config),
        "commit": experiments.commit(),
    }
    row |= {
        "seconds": round(time.perf_counter() - started, 1),
        "steps": len(rows),
        "greedy": final.greedy,
        "accuracy": final.avg_at_k,
    }
    experiments.forget_compiled()
    return row | accounts(rows, start_accuracy, final.avg_at_k)


def accounts(rows: Sequence[Mapping[str, float]], start: float, final: float) -> dict[str, Any]:
    """Returns the curve, the series, and the generated tokens, filter rollouts included, with the
    origins of their advantages, from the metrics of every step.
    """
    filtered = rows[0].get("waste/filter_tokens", 0.0)
    tokens = np.cumsum([row["waste/tokens_generated"] for row in rows]) + filtered
    signal = {
        name: sum(row["waste/tokens_generated"] * row[f"waste/frac_{name}"] for row in rows)
        for name in SIGNALS
    }
    signal["none"] += filtered
    curve = [[float(filtered), start]]
    curve += [
        [float(t), row["eval/heldout/avg_at_k"]]
        for t, row in zip(tokens, rows, strict=True)
        if "eval/heldout/avg_at_k" in row
    ]
    if curve[-1][0] != tokens[-1]:
        curve.append([float(tokens[-1]), final])
    return {
        "tokens": float(tokens[-1]),
        "filter_tokens": filtered,
        "shares": {name: value / float(tokens[-1]) for name, value in signal.items()},
        "curve": curve,
        "series": {name: [row.get(name) for row in rows] for name in SERIES},
    }


def tokens_to_reach(curve: Sequence[Sequence[float]], accuracy: float) -> float | None:
    """Returns the tokens at which the curve first passes `accuracy`, linearly interpolated, or None
    if it does not.
    """
    for (t0, a0), (t1, a1) in itertools.pairwise(curve):
        if a1 >= accuracy:
            return (
                t1 if a1 == a0 or a0 >= accuracy else t0 + (accuracy - a0) / (a1 - a0) * (t1 - t0)
            )
    return None


def mean_height(curve: Sequence[Sequence[float]], until: float) -> float:
    """Returns the mean accuracy over the tokens up to `until` (a budget that all compared runs
    spent), linear between points: a run that improves sooner has a greater mean.
    """
    tokens, accuracy = np.asarray(curve, np.float64).T
    grid = np.append(tokens[tokens < until], until)
    return float(np.trapezoid(np.interp(grid, tokens, accuracy), grid) / (until - tokens[0]))


def by_variant(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the rows of each variant by seed, variants in the order of their first rows."""
    out: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        out.setdefault(row["variant"], []).append(row)
    return {name: sorted(runs, key=lambda row: row["seed"]) for name, runs in out.items()}


def spread(values: Sequence[float], form: str = "{:.3f}") -> str:
    """Returns "mean (least to greatest)", or a single value alone."""
    values = list(values)
    mean = form.format(float(np.mean(values)))
    return (
        mean
        if len(values) == 1
        else f"{mean} ({form.format(min(values))} to {form.format(max(values))})"
    )


def plot_curves(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draws held-out accuracy against tokens generated: the mean over seeds of each variant as a
    line, the seeds faintly behind it.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 5), layout="constrained")
    styles = itertools.product(("-", "--", ":"), COLOURS)
    for (style, colour), (name, runs) in zip(styles, by_variant(rows).items(), strict=False):
        curves = [np.array(row["curve"]) for row in runs]
        for curve in curves:
            axes.plot(curve[:, 0] / 1e3, curve[:, 1], color=colour, alpha=0.25, linewidth=0.8)
        grid = np.linspace(max(c[0, 0] for c in curves), min(c[-1, 0] for c in curves), 60)
        mean = np.mean([np.interp(grid, c[:, 0], c[:, 1]) for c in curves], axis=0)
        axes.plot(grid / 1e3, mean, style, color=colour, linewidth=2, label=f"{name} ({len(runs)})")
    axes.set(
        xlabel="tokens generated, in thousands (everything counted)",
        ylabel="held-out accuracy, avg@k",
        title=title,
    )
    axes.legend(
        title="variant (seeds)",
        frameon=False,
        fontsize=8,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
