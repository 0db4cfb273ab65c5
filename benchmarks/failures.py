"""Pictures of the failure signatures (docs/howto/failures.md), from runs that show them, and the
guard's false alarms on sound runs.

    python -m benchmarks.failures RUN [--inversion benchmarks/results/inversion.jsonl]
        [--out runs/failures]

RUN is the directory of a cold start of benchmarks/tokens_to_accuracy.py (seed 0). From it two runs
of STEPS steps are made: one with a KL penalty, whose learning rate rises until a step breaks the
policy, and one whose rate is so low that nothing changes. "Reward up, gold down" is the
judge-trained run of INVERSION with the earliest alarm. The sound runs are the SOUND first of
INVERSION that a scalar model rewarded; of them windows are resampled (rl/signatures.py). Writes
OUT/failures.jsonl, failure_loss_spike.png, failure_stagnant_reward.png and
failure_reward_up_gold_down.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiments, inversion, tokens_to_accuracy
from compass_jax.config import GuardConfig, OptimConfig
from compass_jax.devices.allocator import tune_allocator
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rl.signatures import SPIKE, STAGNANT, parting_p, trend
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.report import read_metrics
from compass_jax.training.rl import run_rl

STEPS, WINDOW, SOUND, LEVEL = 32, 12, 10, 0.05
RATES = {"loss_spike": 5e-3, "stagnant_reward": 1e-8}
# run -> (metric, its name in the picture, the limit beyond which the guard prints its notice)
PANELS = {
    "loss_spike": [("loss", "loss"), ("guard/loss_spike", "median distances (guard/loss_spike)")],
    "stagnant_reward": [
        ("reward/mean", "reward/mean"),
        ("guard/reward_rise_bound", "largest rise (guard/reward_rise_bound)"),
    ],
}
LIMITS = {"guard/loss_spike": SPIKE, "guard/reward_rise_bound": STAGNANT}


def measure(name: str, cold_start: str, out: Path) -> dict[str, Any]:
    """Trains a run with the rate of its signature; returns its row."""
    config = tokens_to_accuracy.base_config(0, out, smoke=False)
    optim = OptimConfig(learning_rate=RATES[name], warmup_steps=STEPS, schedule="constant")
    rl = dataclasses.replace(
        config.rl, steps=STEPS, prompts_per_step=16, group_size=4, optim=optim, eval_every=0
    )
    if name == "loss_spike":  # without a penalty the loss of a rollout's only update is 0
        rl = dataclasses.replace(rl, objective=Grpo(kl_coef=0.1))
    rl = dataclasses.replace(rl, guard=GuardConfig(window=WINDOW))
    data = dataclasses.replace(config.data, eval_prompts=0)
    run_rl(
        dataclasses.replace(config, rl=rl, data=data, init_from=cold_start, run_dir=str(out / name))
    )
    metrics = read_metrics(out / name / "metrics.jsonl", "rl")
    series = {
        metric: dict(zip(map(int, metrics[metric][0]), map(float, metrics[metric][1]), strict=True))
        for metric, _ in PANELS[name]
    }
    return {"name": name, "rate": RATES[name], "commit": experiments.commit(), "series": series}


def parted(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the judge-trained run with the earliest alarm."""
    alarmed = [row for row in rows if row["variant"] == "judge" and row["alarm"]]
    if not alarmed:
        raise SystemExit("no judge-trained run with an alarm: run benchmarks.inversion first")
    return min(alarmed, key=lambda row: row["alarm"])


def false_alarms(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the estimated false alarms of the sound runs: of one test and, as a bound, of all
    tests of a run.
    """
    sound = [row for row in rows if row["variant"].startswith("scalar")][:SOUND]
    if len(sound) < SOUND:
        raise SystemExit(f"{len(sound)} runs with a scalar model, {SOUND} are needed")
    reward, gold = (
        np.array([row["series"][name] for row in sound], float)
        for name in ("reward/mean", "reward/gold/mean")
    )
    tests = reward.shape[1] - WINDOW + 1
    rate = false_alarm_rate(reward, gold, WINDOW, LEVEL / tests, draws=200_000)
    return {"runs": len(sound), "tests": tests, "rate_of_a_test": rate, "of_a_run": rate * tests}


def false_alarm_rate(
    reward: np.ndarray,
    gold: np.ndarray,
    window: int,
    level: float,
    draws: int = 10_000,
    seed: int = 0,
) -> float:
    """Estimates how often a window of a sound run is a false alarm, from sound runs [r t].

    A draw takes a window of a run, its two fitted lines, and for each step the residuals of a
    random step of this window, scaled by sqrt(n / (n - 2)) for the two parameters of a line. A
    gold line that falls is laid flat: in a sound run its fall is noise. A run of T steps has at
    most T - window + 1 times this rate of false alarms.
    """
    rng = np.random.default_rng(seed)
    runs, steps = reward.shape
    run = rng.integers(runs, size=draws)[:, None]
    start = rng.integers(steps - window + 1, size=draws)[:, None]
    at = run, start + np.arange(window)  # [draws, window]
    drawn = rng.integers(window, size=(draws, window))
    x = np.arange(window) - (window - 1) / 2
    resampled = []
    for values, lowest in ((reward, -np.inf), (gold, 0.0)):
        y = np.asarray(values, np.float64)[at]
        slope, middle = trend(y).slope[:, None], y.mean(-1, keepdims=True)
        residual = (y - middle - slope * x) * np.sqrt(window / (window - 2))
        noise = np.take_along_axis(residual, drawn, -1)
        resampled.append(middle + np.maximum(slope, lowest) * x + noise)
    return float(np.mean(parting_p(*resampled) <= level))


def plot(panels: Sequence[tuple[str, Mapping[int, float], float | None]], path: Path) -> None:
    """Draws one curve per panel, and the limit at which the guard prints its notice."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(9, 3), layout="constrained")
    for panel, (title, series, limit) in zip(axes, panels, strict=True):
        panel.plot(list(series), list(series.values()), color="#2563eb", linewidth=1.8)
        if limit is not None:
            panel.axhline(limit, color="#b91c1c", linewidth=1, linestyle="--")
        panel.set(xlabel="step", title=title)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Makes the runs that are not finished, the pictures, and the estimate of false alarms."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="directory of a cold start of benchmarks.tokens_to_accuracy")
    parser.add_argument("--inversion", default="benchmarks/results/inversion.jsonl")
    parser.add_argument("--out", default="runs/failures", help="directory of the results")
    args = parser.parse_args(argv)
    if argv is None:
        tune_allocator()
        keep_programs()
    out, file = Path(args.out), Path(args.out) / "failures.jsonl"
    for name in RATES:
        if all(row["name"] != name for row in experiments.finished(file)):
            experiments.append(file, measure(name, args.run, out))
    for row in experiments.finished(file):
        panels = [
            (title, {int(step): x for step, x in row["series"][metric].items()}, LIMITS.get(metric))
            for metric, title in PANELS[row["name"]]
        ]
        plot(panels, out / f"failure_{row['name']}.png")
    rows = experiments.finished(Path(args.inversion))
    series, level = parted(rows)["series"], LEVEL / (inversion.Sizes().steps - WINDOW + 1)
    names = {"reward/mean": "reward/mean", "reward/gold/mean": "reward/gold/mean"}
    names |= {"guard/parting_p": "p-value (guard/parting_p)"}
    curves = {
        name: {n: x for n, x in enumerate(series[name], 1) if x is not None} for name in names
    }
    limits = {"guard/parting_p": level}
    plot(
        [(names[name], curves[name], limits.get(name)) for name in names],
        out / "failure_reward_up_gold_down.png",
    )
    print(json.dumps(false_alarms(rows)))


if __name__ == "__main__":
    main()
