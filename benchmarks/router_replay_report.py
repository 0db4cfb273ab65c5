"""Tables and picture of the router replay experiment, from its lines of JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compass_jax.runs.rundir import write_atomically

# colours that colour-blind readers can tell apart (Okabe and Ito)
COLOURS = {"off": "#D55E00", "R2": "#E69F00", "R3": "#0072B2"}
MARKS = {"off": "o", "R2": "s", "R3": "^"}
PRECISIONS = ("bf16", "e4m3", "int8", "bf16_slow")
NAMES = {
    "bf16": "bfloat16",
    "e4m3": "e4m3",
    "int8": "int8",
    "bf16_slow": "bfloat16, learning rate / 10",
}
BARS = {"logp_abs_diff": 3.0, "kl_k3": 10.0}  # required ratio of off to R3 in bfloat16

Row = Mapping[str, Any]


def latest(rows: Iterable[Row]) -> list[Row]:
    """Returns the last row of each (variant, seed); an earlier one may have other settings."""
    return list({(row["variant"], row["seed"]): row for row in rows}.values())


def spread(values: Sequence[float], form: str = "{:.2e}") -> str:
    """Returns the mean and, of two or more values, their standard deviation (ddof 1)."""
    mean = form.format(np.mean(values))
    return mean if len(values) < 2 else f"{mean} ± {form.format(np.std(values, ddof=1))}"


def values(
    rows: Sequence[Row], variant: str, mode: str, updates: int, of: Callable[[Row], float]
) -> list[float]:
    """Returns one number per seed."""
    points = [p for row in rows if row["variant"] == variant for p in row["points"]]
    return [of(p) for p in points if (p["mode"], p["updates"]) == (mode, updates)]


def ratios(rows: Sequence[Row], variant: str, measure: str) -> list[float]:
    """Returns off / R3 of each seed before the first update, against the recorded rollout."""
    off, r3 = (
        values(rows, variant, mode, 0, lambda p: p["recorded"][measure]) for mode in ("off", "R3")
    )
    return [a / b for a, b in zip(off, r3, strict=True)]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a table."""
    return (
        "\n".join(
            "| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines)
        )
        + "\n"
    )


def fresh_table(rows: Sequence[Row]) -> str:
    """Returns a table of the gap between rollout and training at the same weights."""
    lines = []
    for variant in PRECISIONS[:3]:
        for mode in ("off", "R2", "R3"):
            columns = [
                values(rows, variant, mode, 0, lambda p, m=m: p["recorded"][m])
                for m in ("logp_abs_diff", "kl_k3", "extreme_frac")
            ]
            if not columns[0]:
                continue
            flips = spread(values(rows, variant, mode, 0, lambda p: 100 * p["flip_frac"]), "{:.2f}")
            any_layer = (
                spread(
                    values(rows, variant, mode, 0, lambda p: 100 * p.get("flip_any_frac", 0)),
                    "{:.1f}",
                )
                if mode == "off"
                else "-"
            )
            lines.append([NAMES[variant], mode, *(spread(v) for v in columns), flips, any_layer])
    header = [
        "rollout",
        "replay",
        "mean abs log-prob gap, nats",
        "k3 KL, nats",
        "share of ratios beyond 2",
        "flips, % of (token, layer)",
    ]
    return markdown([*header, "flips in any layer, % of tokens"], lines)


def stale_table(rows: Sequence[Row]) -> str:
    """Returns a table of the gap after updates: against the sampler at the weights of that moment,
    against the recorded rollout, and within training.
    """
    lines = []
    for variant in PRECISIONS:
        for updates in (1, 4, 8):
            for mode in ("off", "R2", "R3"):
                of = [
                    lambda p: 100 * p["distance"],
                    *(
                        lambda p, m=m: p["now"][m]
                        for m in ("logp_abs_diff", "kl_k3", "extreme_frac")
                    ),
                ]
                of += [
                    lambda p: p["recorded"]["logp_abs_diff"],
                    lambda p: p["recorded"]["kl_k3"],
                    lambda p: p["drift"],
                ]
                columns = [values(rows, variant, mode, updates, one) for one in of]
                flips = values(rows, variant, mode, updates, lambda p: 100 * p["flip_frac"])
                if flips:
                    numbers = [spread(columns[0], "{:.3f}"), *(spread(v) for v in columns[1:])]
                    lines.append(
                        [NAMES[variant], str(updates), mode, *numbers, spread(flips, "{:.2f}")]
                    )
    header = [
        "rollout",
        "updates",
        "replay",
        "weights moved, %",
        "now: gap, nats",
        "now: k3",
        "now: beyond 2",
    ]
    return markdown(
        [*header, "recorded: gap, nats", "recorded: k3", "drift, nats", "flips, %"], lines
    )


def cause_points(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the points of each cause, one for each seed, in the order of the runs' rows."""
    by_cause: dict[str, list[Row]] = {}
    for row in rows:
        for point in row["points"] if row["variant"] == "causes" else ():
            by_cause.setdefault(point["cause"], []).append(point)
    return by_cause


def cause_table(rows: Sequence[Row]) -> str:
    """Returns a table of the gap that remains with one part of the sampler in float32, and of the
    gap that one part alone makes.
    """
    lines = [
        [
            cause,
            *(spread([p[mode]["logp_abs_diff"] for p in points]) for mode in ("off", "R3")),
            *(spread([p[mode]["kl_k3"] for p in points]) for mode in ("off", "R3")),
            spread([100 * p["flip_frac"] for p in points], "{:.2f}"),
        ]
        for cause, points in cause_points(rows).items()
    ]
    return markdown(
        [
            "sampler",
            "gap off, nats",
            "gap R3, nats",
            "k3 off",
            "k3 R3",
            "flips, % of (token, layer)",
        ],
        lines,
    )


def curve_table(rows: Sequence[Row]) -> str:
    """Returns a table of the reward of the last quarter of the steps, held-out accuracy, gap and
    flips over all steps.
    """
    lines = []
    for mode in ("off", "R3"):
        runs = [row for row in rows if row["variant"] == f"curve_{mode}"]
        if runs:
            last = [
                np.mean(
                    run["curves"]["reward/mean"][-max(1, len(run["curves"]["reward/mean"]) // 4) :]
                )
                for run in runs
            ]
            first = [run["curves"]["reward/mean"][0] for run in runs]
            gaps = [np.mean(run["curves"]["mismatch/logp_abs_diff"]) for run in runs]
            kl = [np.mean(run["curves"]["mismatch/kl_k3"]) for run in runs]
            scores = [
                spread(x, "{:.3f}")
                for x in (
                    first,
                    last,
                    [run["avg_at_k"] for run in runs],
                    [run["greedy"] for run in runs],
                )
            ]
            lines.append([mode, str(len(runs)), *scores, spread(gaps), spread(kl)])
    return markdown(
        [
            "replay",
            "seeds",
            "reward, first step",
            "reward, last quarter",
            "held-out avg@4",
            "held-out greedy",
            "gap, nats",
            "k3",
        ],
        lines,
    )


def verdict(rows: Sequence[Row]) -> str:
    """Returns whether the bars are met, seed by seed."""
    text = []
    for measure, bar in BARS.items():
        seed_ratios = ratios(rows, "bf16", measure)
        if seed_ratios:
            each = ", ".join(f"{x:.1f}" for x in seed_ratios)
            met = "met" if min(seed_ratios) >= bar else "missed"
            text.append(
                f"{measure}: off / R3 = {spread(seed_ratios, '{:.1f}')} (seeds: {each}); asked for:"
                f" {bar:g}; {met}."
            )
    return "\n".join(f"- {line}" for line in text) + "\n"


def text_of(rows: Sequence[Row]) -> str:
    """Returns the whole report in Markdown."""
    rows = latest(rows)
    seeds = sorted({row["seed"] for row in rows})
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    minutes = sum(row["seconds"] for row in rows) / 60
    return f"""# Router replay between a low-precision rollout and float32 training

`python -m benchmarks.router_replay`; seeds {seeds}; commits {commits}; {minutes:.0f} minutes in
all runs. Mean ± standard deviation between seeds.
What is compared is said in the docstring of benchmarks/router_replay.py.

## Same weights: the recorded rollout against the training pass

{fresh_table(rows)}
{verdict(rows)}
## After updates: how the recorded routes age

{stale_table(rows)}
## Causes of the gap, bfloat16, sequences of the recorded rollout

{cause_table(rows)}
## RL of the small model, bfloat16 rollout, eight updates per rollout

{curve_table(rows)}"""


def _draw_fresh(axes: Any, rows: Sequence[Row]) -> None:
    for i, variant in enumerate(PRECISIONS[:3]):
        for j, mode in enumerate(("off", "R2", "R3")):
            gaps = values(rows, variant, mode, 0, lambda p: p["recorded"]["logp_abs_diff"])
            x = [i + 0.2 * (j - 1)] * len(gaps)
            axes.plot(
                x,
                gaps,
                MARKS[mode],
                color=COLOURS[mode],
                label=mode if i == 0 else None,
                markersize=7,
                alpha=0.8,
            )
    axes.set(
        yscale="log",
        ylabel="mean |log-prob gap|, nats",
        title="same weights, one mark per seed",
        xlim=(-0.5, 2.5),
    )
    axes.set_xticks(range(3), [NAMES[v] for v in PRECISIONS[:3]])
    axes.legend(title="replay")


def _draw_stale(axes: Any, rows: Sequence[Row]) -> None:
    for mode in ("off", "R2", "R3"):
        points = [
            p
            for row in rows
            if row["variant"] in ("bf16", "bf16_slow")
            for p in row["points"]
            if p["mode"] == mode and p["updates"]
        ]
        points.sort(key=lambda p: p["distance"])
        x, y = [100 * p["distance"] for p in points], [p["now"]["logp_abs_diff"] for p in points]
        axes.plot(x, y, MARKS[mode], color=COLOURS[mode], label=mode, markersize=6, alpha=0.8)
        fresh = values(rows, "bf16", mode, 0, lambda p: p["recorded"]["logp_abs_diff"])
        if fresh:
            axes.axhline(
                float(np.mean(fresh)),
                color=COLOURS[mode],
                linewidth=1,
                linestyle="--" if mode == "off" else ":",
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="distance of the weights from the rollout's, %",
        ylabel="mean |log-prob gap|, nats",
    )
    axes.set_title(
        "bfloat16: stale routes, sampler at the same weights\n(lines: recorded rollout, before the"
        " first update)"
    )
    axes.legend(title="replay")


def _draw_causes(axes: Any, rows: Sequence[Row]) -> None:
    points = cause_points(rows)
    names = list(points)[::-1]
    axes.set_title("causes: parts of the bfloat16 sampler in float32")
    if not names:
        return
    for mode, shift in (("off", 0.2), ("R3", -0.2)):
        mean = [np.mean([p[mode]["logp_abs_diff"] for p in points[name]]) for name in names]
        axes.barh(np.arange(len(names)) + shift, mean, height=0.38, color=COLOURS[mode], label=mode)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xscale="log", xlabel="mean |log-prob gap|, nats")
    axes.set_xlim(right=8 * axes.get_xlim()[1])  # room for the legend
    axes.legend(title="replay", loc="upper right")


def _draw_curves(axes: Any, rows: Sequence[Row]) -> None:
    for mode in ("off", "R3"):
        runs = [row["curves"]["reward/mean"] for row in rows if row["variant"] == f"curve_{mode}"]
        if runs:
            length = min(len(run) for run in runs)
            y, x = np.array([run[:length] for run in runs]), np.arange(1, length + 1)
            axes.fill_between(x, y.min(0), y.max(0), color=COLOURS[mode], alpha=0.2, linewidth=0)
            axes.plot(
                x,
                y.mean(0),
                color=COLOURS[mode],
                marker=MARKS[mode],
                markersize=4,
                label=f"{mode} ({len(runs)} seeds)",
            )
    axes.set(
        xlabel="RL step (8 updates each)",
        ylabel="mean reward (share of right answers)",
        title="RL of the small model: mean and range of seeds",
    )
    if axes.lines:
        axes.legend(title="replay")


def write_report(rows: Sequence[Row], out: Path) -> None:
    """Prints the tables and writes OUT/router_replay.md and OUT/router_replay.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    text = text_of(rows)
    write_atomically(out / "router_replay.md", text)
    print(text)
    figure, axes = plt.subplots(2, 2, figsize=(13, 10), layout="constrained")
    for draw, panel in zip(
        (_draw_fresh, _draw_stale, _draw_causes, _draw_curves), axes.flat, strict=True
    ):
        draw(panel, latest(rows))
        # without measurements a logarithmic axis is an error
        if not np.isfinite(panel.dataLim.get_points()).all():
            panel.set(xscale="linear", yscale="linear")
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "router_replay.png", dpi=110)
    plt.close(figure)
