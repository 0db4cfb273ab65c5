"""`compass train-judge`: trains a judge by SFT on the verdicts of preferences, then by RL with the
verdict as the answer. Measures it on held-out pairs after each stage.

    FOLDER/sft, FOLDER/rl                  the two runs, which resume like any run
    FOLDER/judged_sft, FOLDER/judged_rl    the results, as of `compass eval-judge`
    FOLDER/scalar, FOLDER/judged_scalar    the same for a scalar reward model (--scalar)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from compass_jax.apps.pipeline.agreement import Ruled, judged, number, own_judge, report
from compass_jax.base.aliases import JsonObject
from compass_jax.config import DataConfig, PolicyConfig, RunConfig
from compass_jax.data.pairs import split_pairs
from compass_jax.data.preferences import SAID, Preference
from compass_jax.devices.distributed import is_main_process
from compass_jax.rewards.judges.agreement import Agreement
from compass_jax.rewards.judges.endpoint import REFUSED
from compass_jax.rewards.judges.scalar import Rate, tie_margin, verdicts
from compass_jax.runs.report import summary_table
from compass_jax.training.rl import run_rl
from compass_jax.training.scalar import ScalarModel, ScalarTrainer
from compass_jax.training.sft import run_sft

MOST_FOR_MARGIN = 1000  # number of training pairs for the tie margin of a scalar model
FEW, MANY = 0.1, 2 / 3  # shares of ties outside which `balance` warns


def balance(preferences: Sequence[Preference]) -> list[str]:
    """Returns messages about the verdicts of pairs: their counts, and a warning for rare or too
    many ties.

    In both orders Better and Worse are equally frequent.
    """
    counts = Counter(pair.gold for pair in preferences)
    listing = ", ".join(f"{name} {counts[gold]}" for gold, name in SAID.items())
    ties = counts[0] / max(len(preferences), 1)
    lines = [f"{len(preferences)} training pairs: {listing}"]
    if ties < FEW:
        lines.append(
            f"{ties:.1%} of the pairs are ties: a judge that never says Tie loses next to nothing;"
            " add pairs of equally good answers"
        )
    if ties > MANY:
        lines.append(
            f"{ties:.1%} of the pairs are ties: a judge that always says Tie is often right"
        )
    return lines


def run_train_judge(config: RunConfig, scalar: bool = False) -> JsonObject:
    """Trains and measures a judge, and returns the result of the last stage. An interrupted run
    resumes.

    The result holds the Agreement after each stage as "sft" and "rl", or as "scalar" for a scalar
    reward model.
    """
    config.validate_for_rl()
    console = Console(soft_wrap=True, emoji=False, quiet=not is_main_process())
    folder = Path(config.directory)
    training, heldout = split_pairs(config.data, config.seed)
    heldout = heldout[: config.data.eval_prompts]
    for line in (*balance(training), f"{len(heldout)} held-out pairs"):
        console.print(line, highlight=False, markup=False)
    if scalar:
        run = replace(config, run_dir=str(folder / "scalar"))
        trained = run_sft(run, kind=ScalarTrainer)
        if trained["stopped"] or not heldout:
            return trained
        sizes = config.sft.buckets, config.sft.micro_batch_tokens
        model = ScalarModel(config.policy, config.data, run.directory, *sizes)
        agreement = _measure_scalar(model, training, heldout, folder)
        return {**trained, "scalar": agreement}
    sft = replace(config, run_dir=str(folder / "sft"))
    console.rule("1/2 supervised fine-tuning on the verdicts, in both orders")
    tuned = run_sft(sft)
    if tuned["stopped"]:
        return tuned
    rl = replace(config, run_dir=str(folder / "rl"), init_from=sft.directory)
    settings = config.policy, config.data, config.seed
    before = _measure(*settings, sft.directory, heldout, folder / "judged_sft")
    console.rule("2/2 reinforcement learning: the verdict is the answer")
    trained = run_rl(rl)
    if trained["stopped"]:
        return trained
    after = _measure(*settings, rl.directory, heldout, folder / "judged_rl")
    if before is not None and after is not None:
        rows = _comparison_rows(before, after)
        console.print(summary_table(rows, title=f"{before.pairs} held-out pairs"))
    console.print(f"the judge: {rl.directory}", highlight=False)
    return {**trained, "sft": before, "rl": after}


def _measure_scalar(
    model: Rate, training: Sequence[Preference], heldout: Sequence[Preference], folder: Path
) -> Agreement:
    """Measures the scalar reward model of FOLDER/scalar on the held-out pairs."""
    rated, run = Rated(model, training[:MOST_FOR_MARGIN]), str(folder / "scalar")
    named = {"judge": run, "tie_margin": rated.margin}
    agreement = report(rated.ruled(heldout), named, str(folder / "judged_scalar"))
    console = Console(soft_wrap=True, emoji=False, quiet=not is_main_process())
    console.print(f"a difference of rewards up to {rated.margin:.3g} is called a tie: the best")
    console.print(f"threshold on the training pairs. The reward model: {run}")
    return agreement


class Rated:
    """Verdicts of a scalar reward model, `rate`.

    A tie is a difference of rewards up to a margin, which is fitted to the `known` pairs.
    """

    def __init__(self, rate: Rate, known: Sequence[Preference]):
        self._rate = rate
        margins, _ = self._margins(known)
        finite = np.isfinite(margins)
        gold = np.array([pair.gold for pair in known])
        self.margin = tie_margin(margins[finite], gold[finite])

    def ruled(self, preferences: Sequence[Preference]) -> list[Ruled]:
        """Returns the verdicts on pairs. Both orders agree by construction."""
        margins, texts = self._margins(preferences)
        out = []
        for pair, margin, text in zip(preferences, margins, texts, strict=True):
            known = math.isfinite(margin)
            ruling = int(verdicts(margin, self.margin)) if known else None
            swapped = None if ruling is None else -ruling
            failures = () if known else (REFUSED, REFUSED)
            out.append(Ruled(pair, ruling, swapped, failures, (text, text)))
        return out

    def _margins(self, preferences: Sequence[Preference]) -> tuple[np.ndarray, list[str]]:
        """Returns r(candidate) - r(anchor), NaN if a text is too long, and both rewards as text."""
        texts = [(x.question, text) for x in preferences for text in (x.candidate, x.anchor)]
        rates = [math.nan if r is None else r for r in self._rate(texts)]
        rewards = np.array(rates).reshape(-1, 2)
        return rewards[:, 0] - rewards[:, 1], [f"rewards {x:.4g} and {y:.4g}" for x, y in rewards]


def _measure(
    policy: PolicyConfig,
    data: DataConfig,
    seed: int,
    weights: str,
    heldout: Sequence[Preference],
    out: Path,
) -> Agreement | None:
    if not heldout:
        return None
    judge = own_judge(policy, data, seed, weights)
    return judged(heldout, judge, {"judge": weights}, str(out))


def _comparison_rows(before: Agreement, after: Agreement) -> list[dict[str, str]]:
    return [
        {"share": name.replace("_", " "), "SFT": number(was), "RL": number(now)}
        for (name, was), now in zip(before._asdict().items(), after, strict=True)
        if isinstance(was, float)
    ]
