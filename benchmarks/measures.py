"""The worth of each measure of the rollout, one added to the other: seconds of a whole RL step,
with a verifier that waits 50 ms per sample.

    python -m benchmarks.measures [--rounds 7] [--cold-starts runs/cold_starts] [--smoke]

The demo's model from its cold start, 64 prompts of 8 samples a step. Every row is a separate run;
the runs take turns step by step, so that a disturbance of the machine meets all alike, and their
medians over the rounds are compared.
    base                     texts are made and sent to the verifiers when the rollout is over
    + detokenisation         texts are made as samples finish, by a thread during the decoding;
                             scored when the rollout is over
    + reward overlap         scored as samples finish: what `compass train` always does
    + 8-bit rollout          rollout.quantize int8; on a CPU emulated: the numbers of 8 bits, not
                             their speed
    + longest first          requests start in the order of their expected lengths
    + one step off           rl.one_step_off: the next rollout runs during the training
    + partial rollouts       rl.partial_prompts, a quarter of the step's: a rollout ends with its
                             last whole group, the rest continues in the next
One row more has reward overlap and a verifier that does not wait: `remaining_wait` is the part of
the wait that remains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import experiments, rl_runs
from compass_jax.config import RunConfig, named_correction
from compass_jax.devices.allocator import tune_allocator
from compass_jax.rewards.score import Scorer
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training.building import Building
from compass_jax.training.hooks.base import StepRecord
from compass_jax.training.session import RunState

# The workers only wait. If there were fewer than the samples that a rollout finishes in 50 ms,
# samples would queue for them, which no overlap could hide.
WORKERS = 32
_TEXTS = ThreadPoolExecutor(1, "texts")


class Late(Scorer):
    """Verifiers that get no sample before the rewards are collected. `texts_early`: the texts are
    still made during the decoding.
    """

    texts_early = False

    def __init__(self, *args: Any, **options: Any):
        self._held: list[tuple[Any, ...]] = []
        super().__init__(*args, **options)

    def submit(self, key, prompt, response) -> None:
        """Stores the sample for `collect`."""
        if self.texts_early:
            response = _TEXTS.submit(response).result
        self._held.append((key, prompt, response))

    def collect(self, block: bool):
        """Submits the stored samples, then collects."""
        for submission in self._held:
            key, prompt, response = submission
            super().submit(key, prompt, response())
        self._held.clear()
        return super().collect(block)


class EarlyTexts(Late):
    """A `Late` scorer whose texts are made during the decoding."""

    texts_early = True


class Variant(NamedTuple):
    """One row: its scorer, its verifier, and the differences of its run from the row before."""

    scorer: type[Scorer]
    verifier: str
    quantize: str = "off"
    longest_first: bool = False
    one_step_off: bool = False
    partial: bool = False


VARIANTS = {
    "base": Variant(Late, "wait"),
    "+ detokenisation": Variant(EarlyTexts, "wait"),
    "+ reward overlap": Variant(Scorer, "wait"),
    "+ 8-bit rollout": Variant(Scorer, "wait", "int8"),
    "+ longest first": Variant(Scorer, "wait", "int8", True),
    "+ one step off": Variant(Scorer, "wait", "int8", True, True),
    "+ partial rollouts": Variant(Scorer, "wait", "int8", True, True, True),
    "no wait": Variant(Scorer, "at_once"),
}


def variant_config(
    variant: Variant, weights: str, folder: Path, steps: int, smoke: bool
) -> RunConfig:
    """Returns the demo's RL run with the row's measures."""
    config = rl_runs.without_stages()
    rl = dataclasses.replace(
        config.rl,
        steps=steps,
        save_every=0,
        eval_every=0,
        one_step_off=variant.one_step_off,
        correction=named_correction("tis"),
        prompts_per_step=4 if smoke else config.rl.prompts_per_step,
        group_size=4 if smoke else config.rl.group_size,
    )
    rl = dataclasses.replace(rl, partial_prompts=rl.prompts_per_step // 4 if variant.partial else 0)
    rollout = dataclasses.replace(
        config.rollout, quantize=variant.quantize, slots=8 if smoke else config.rollout.slots
    )
    verifier = f"benchmarks.slow_verifier:{variant.verifier}"
    sources = tuple(dataclasses.replace(s, verifier=verifier) for s in config.data.sources)
    data = dataclasses.replace(config.data, eval_prompts=0, sources=sources)
    rewards = dataclasses.replace(config.rewards, workers=WORKERS)
    return dataclasses.replace(
        config,
        rl=rl,
        rollout=rollout,
        data=data,
        rewards=rewards,
        init_from=weights,
        run_dir=str(folder),
    )


def steps_of(
    variant: Variant, config: RunConfig, scope: contextlib.ExitStack
) -> Iterator[StepRecord]:
    """Returns an iterator over the row's steps."""
    scorer = scope.enter_context(variant.scorer(config.rewards, config.data))
    scorer.wait_ready()
    telemetry = scope.enter_context(Telemetry(config.directory, config.rl.steps, "rl"))
    trainer = Building(config, scorer, RunState(), telemetry).trainer()
    if not variant.longest_first:
        trainer.collect.expected_length = lambda prompt: math.nan
    return trainer.steps()


def measure(weights: str, out: Path, rounds: int, smoke: bool) -> list[dict[str, Any]]:
    """Returns one row of numbers for each variant: medians over the rounds, without the first two
    steps of each.
    """
    warm = 2
    with contextlib.ExitStack() as scope:
        running = {
            name: steps_of(
                variant,
                variant_config(variant, weights, out / str(i), rounds + warm + 1, smoke),
                scope,
            )
            for i, (name, variant) in enumerate(VARIANTS.items())
        }
        timings: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
        for r in range(rounds + warm):
            for name in list(VARIANTS)[:: -1 if r % 2 else 1]:
                started = time.perf_counter()
                metrics = next(running[name]).metrics
                timings[name].append({"step_s": time.perf_counter() - started, **metrics})
            print(
                f"round {r + 1 - warm}: "
                + ", ".join(
                    f"{name} {steps[-1]['step_s']:.2f} s" for name, steps in timings.items()
                ),
                flush=True,
            )
    rows = []
    for name, steps in timings.items():
        counted = steps[warm:]
        row = {
            "variant": name,
            **{
                key: statistics.median(x[key] for x in counted)
                for key in ("step_s", "time/rollout_s", "time/reward_wait_s")
            },
        }
        rows.append(
            {
                **row,
                "tokens": statistics.median(x["waste/tokens_generated"] for x in counted),
                "steps_s": [x["step_s"] for x in counted],
            }
        )
    return rows


def remaining_wait(rows: list[dict[str, Any]]) -> float:
    """Returns the cost with overlap of a verifier that waits, as a share of its cost without
    overlap, in seconds of rollout and of waiting for rewards.
    """
    cost = {row["variant"]: row["time/rollout_s"] + row["time/reward_wait_s"] for row in rows}
    return (cost["+ reward overlap"] - cost["no wait"]) / (
        cost["+ detokenisation"] - cost["no wait"]
    )


def main(argv: list[str] | None = None) -> None:
    """Measures and prints the table, then one JSON line."""
    if argv is None:
        tune_allocator()
    parser = rl_runs.parser(__doc__, "measures", cold_starts="cold_starts")
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="steps of each row that are counted (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    out = Path(args.out)
    if out.exists():
        parser.error(f"--out {out} exists: name another directory, or remove it")
    weights = "" if args.smoke else rl_runs.cold_start(0, Path(args.cold_starts))
    rows = measure(weights, out, args.rounds, args.smoke)
    print(report(rows))
    summary = {
        "benchmark": "measures",
        "smoke": args.smoke,
        "wait_over_no_overlap": round(remaining_wait(rows), 4),
        "rows": rows,
    }
    print(json.dumps({**summary, "commit": experiments.commit()}), flush=True)


def report(rows: list[dict[str, Any]]) -> str:
    """Returns the cumulative table in Markdown."""
    base, before = rows[0]["step_s"], rows[0]["step_s"]
    lines = [
        "| measures | step, s | base over it | the row before over it | rollout, s | waiting for"
        " rewards, s | thousand tokens |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [
            row["variant"],
            f"{row['step_s']:.2f}",
            f"{base / row['step_s']:.2f}",
            f"{before / row['step_s']:.2f}",
        ]
        if row["variant"] == "no wait":
            cells[3] = ""
        cells += [
            f"{row['time/rollout_s']:.2f}",
            f"{row['time/reward_wait_s']:.2f}",
            f"{row['tokens'] / 1e3:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
        before = row["step_s"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
