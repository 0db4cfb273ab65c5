"""`compass train-judge`: SFT on the verdicts of preferences, then RL with the verdict as the
answer; the judge is measured on held-out pairs after each.

    FOLDER/sft, FOLDER/rl                  the two runs, which go on like any run
    FOLDER/judged_sft, FOLDER/judged_rl    what `compass eval-judge` would write
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from compass_jax.config import ConfigError, DataConfig, FileSource, RunConfig
from compass_jax.config.verifiers import VERDICT, pairs
from compass_jax.data.preferences import SAID, Preference, read_preferences
from compass_jax.data.procedural import normalised
from compass_jax.data.questions import is_heldout
from compass_jax.eval_judge import judged, number, own_judge
from compass_jax.report import summary_table
from compass_jax.rewards.agreement import Agreement
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft

FEW, MANY = 0.1, 2 / 3  # shares of ties between which nothing is said


def split_pairs(data: DataConfig) -> tuple[list[Preference], list[Preference]]:
    """(training, held-out) pairs, on the sides on which RL has their questions.

    Raises ConfigError where no source has preferences, DataError for rows that cannot be used.
    """
    found, held = (list(_pairs(data, key)) for key in ("sources", "eval_sources"))
    if not found:
        raise ConfigError(
            f"data.sources: no file of preferences; a judge learns from FileSource(path,"
            f" verifier={VERDICT!r})"
        )
    if data.eval_sources:
        asked = {normalised(pair.question) for pair in held}
        return [pair for pair in found if normalised(pair.question) not in asked], held
    sides: tuple[list[Preference], list[Preference]] = ([], [])
    for pair in found:
        sides[is_heldout(pair.question, data.heldout_frac)].append(pair)
    return sides


def _pairs(data: DataConfig, key: str) -> Iterator[Preference]:
    for source in getattr(data, key):
        if isinstance(source, FileSource) and VERDICT in dict(pairs(source.verifier)):
            yield from read_preferences(source.path)


def balance(found: Sequence[Preference]) -> list[str]:
    """What to tell of the verdicts of pairs: their counts, and ties that are rare or too many. In
    both orders Better and Worse are as many.
    """
    counts = Counter(pair.gold for pair in found)
    said = ", ".join(f"{name} {counts[gold]}" for gold, name in SAID.items())
    ties = counts[0] / max(len(found), 1)
    lines = [f"{len(found)} training pairs: {said}"]
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


def run_train_judge(config: RunConfig) -> dict[str, Any]:
    """Trains and measures; a run that was ended goes on. Returns what the last stage returned, with
    the Agreement after each stage as "sft" and "rl".
    """
    config.validate_for_rl()
    console, folder = Console(soft_wrap=True), Path(config.directory)
    training, held = split_pairs(config.data)
    held = held[: config.data.eval_prompts]
    for line in (*balance(training), f"{len(held)} held-out pairs"):
        console.print(line, highlight=False, markup=False)
    sft = replace(config, run_dir=str(folder / "sft"))
    console.rule("1/2 supervised fine-tuning on the verdicts, in both orders")
    tuned = run_sft(sft)
    if tuned["stopped"]:
        return tuned
    rl = replace(config, run_dir=str(folder / "rl"), init_from=sft.directory)
    before = _measured(rl, sft.directory, held, folder / "judged_sft")
    console.rule("2/2 reinforcement learning: the verdict is the answer")
    trained = run_rl(rl)
    if trained["stopped"]:
        return trained
    after = _measured(rl, rl.directory, held, folder / "judged_rl")
    if before is not None and after is not None:
        rows = _beside(before, after)
        console.print(summary_table(rows, title=f"{before.pairs} held-out pairs"))
    console.print(f"the judge: {rl.directory}", highlight=False)
    return {**trained, "sft": before, "rl": after}


def _measured(
    config: RunConfig, weights: str, held: Sequence[Preference], out: Path
) -> Agreement | None:
    if not held:
        return None
    return judged(held, own_judge(config, weights), {"judge": weights}, str(out))


def _beside(before: Agreement, after: Agreement) -> list[dict[str, str]]:
    return [
        {"share": name.replace("_", " "), "SFT": number(was), "RL": number(now)}
        for (name, was), now in zip(before._asdict().items(), after, strict=True)
        if isinstance(was, float)
    ]
