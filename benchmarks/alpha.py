"""Experiment: how ESPO's alpha clips on vocabularies of 512, 8,192 and 32,768 and on two model
sizes (benchmarks/calibrate_alpha.py for each).

    python -m benchmarks.alpha [--out runs/alpha] [--seed 0] [--smoke]

Each model has the cold start of configs/tiny_reasoning_cpu.py, a fifth as long, and 4 updates per
rollout at its learning rate. The text is the same for all, so that a larger vocabulary has ids that
never come, as the padded vocabularies of released models have: it shows what ln(v) in the clip
range does, not what longer tokens do. A line per finished model goes to OUT/alpha.jsonl;
at the end OUT/alpha.md and OUT/alpha.png.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import experiments, rl_runs
from benchmarks.calibrate_alpha import ALPHAS, run_calibration
from compass_jax.config import RunConfig
from compass_jax.devices.allocator import tune_allocator
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.sft import run_sft

VOCABULARIES = (512, 8192, 32768)
SIZES = {"4 layers of 128": (4, 128), "2 layers of 64": (2, 64)}


def model_config(size: str, vocab: int, seed: int, folder: Path, smoke: bool) -> RunConfig:
    """Returns configs/tiny_reasoning_cpu.py with another model and a short cold start."""
    config = rl_runs.without_stages()
    layers, hidden = SIZES[size]
    model = dataclasses.replace(config.model, vocab_size=vocab, layers=layers, hidden=hidden)
    sft = dataclasses.replace(
        config.sft, steps=4 if smoke else 300, batch=8 if smoke else config.sft.batch
    )
    rl = dataclasses.replace(config.rl, updates_per_rollout=4, prompts_per_step=8 if smoke else 64)
    data = dataclasses.replace(config.data, eval_prompts=0)
    run_dir = str(folder / f"{size.replace(' ', '_')}_{vocab}")
    return dataclasses.replace(
        config, model=model, sft=sft, rl=rl, data=data, seed=seed, run_dir=run_dir
    )


def main(argv: list[str] | None = None) -> None:
    """Measures the models that are not finished yet, then writes the table and the picture."""
    if argv is None:
        tune_allocator()
    parser = rl_runs.parser(__doc__, "alpha")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--vocabularies", type=int, nargs="+", choices=VOCABULARIES, default=list(VOCABULARIES)
    )
    args = parser.parse_args(argv)
    out = Path(args.out)
    results = out / "alpha.jsonl"
    for size in SIZES:
        for vocab in args.vocabularies:
            if (size, vocab, args.seed) in {
                (r["size"], r["vocab"], r["seed"]) for r in experiments.finished(results)
            }:
                continue
            config = model_config(size, vocab, args.seed, out, args.smoke)
            run_sft(config)
            calibration = run_calibration(config, config.directory, config.directory, ALPHAS)
            experiments.forget_compiled()
            row = {
                "size": size,
                "vocab": vocab,
                "seed": args.seed,
                "hash": experiments.config_hash(config),
                "commit": experiments.commit(),
            }
            experiments.append(
                results,
                {
                    **row,
                    "suggested_alpha": calibration["suggested_alpha"],
                    "rows": calibration["rows"],
                },
            )
    rows = experiments.finished(results)
    write_atomically(out / "alpha.md", report(rows))
    plot(rows, out / "alpha.png")
    print(report(rows))


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown: clip fraction at each alpha, and at 0.02 the groups' ranges and
    how often the floor acts.
    """
    lines = [
        "| model | vocabulary | "
        + " | ".join(f"alpha {a:g}" for a in ALPHAS)
        + " | range at 0.02, low / high | floor at 0.02, low / high |"
    ]
    lines += ["|---" * (len(ALPHAS) + 4) + "|"]
    for row in rows:
        by_alpha = {r["alpha"]: r for r in row["rows"]}
        at = by_alpha[0.02]
        cells = [
            row["size"],
            f"{row['vocab']:,}",
            *(f"{by_alpha[a]['clip_frac']:.3f}" for a in ALPHAS),
        ]
        cells.append(f"{at['group_0 epsilon']:.1e} / {at['group_1 epsilon']:.1e}")
        cells.append(
            f"{100 * at['group_0 floor_frac']:.0f} % / {100 * at['group_1 floor_frac']:.0f} %"
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the clip fraction against alpha, a line for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for row in rows:
        colour = rl_runs.COLOURS[VOCABULARIES.index(row["vocab"])]
        style = "-" if row["size"] == next(iter(SIZES)) else "--"
        x, y = ([r[name] for r in row["rows"]] for name in ("alpha", "clip_frac"))
        axes.plot(x, y, style, color=colour, label=f"{row['size']}, {row['vocab']:,}")
    axes.set(
        xlabel="alpha",
        ylabel="clipped tokens, share (updates 2 to 4)",
        xscale="log",
        title="ESPO's clipping against alpha",
    )
    axes.legend(title="model, vocabulary", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
