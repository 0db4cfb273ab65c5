"""`compass data`: shows the prompts of a configuration as the model sees them."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from compass_jax.base.records import EPISODE, Prompt, Score
from compass_jax.commands.dry_run import try_rows
from compass_jax.config import ScoredConfig
from compass_jax.config.data import HELDOUT
from compass_jax.data.prompts import evaluation_sets, train_prompts
from compass_jax.data.questions import unique_notices
from compass_jax.data.tokenizer import Tokenizer, load_tokenizer
from compass_jax.experience.scorer import open_scorer
from compass_jax.rewards.answer_form import missing_requests
from compass_jax.rewards.faults import summary
from compass_jax.runs.screen import text_lines

MOST_REFERENCES = 64  # number of ground truths that are judged
_BAR = 40
_WHOLE = 1000  # maximum lines of a prompt


def run_look(
    vocab_size: int, scored: ScoredConfig, most: int = 2, console: Console | None = None
) -> float | None:
    """Prints the splits, lengths against the prompt buckets, `most` rendered prompts, and the
    verdicts on the rows' own ground truths.

    Returns the share of right ones among the ground truths that have a verdict; None if no one has.
    Raises the errors of reading the data.
    """
    console = console or Console(emoji=False)

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    data, seed = scored.data, scored.seed
    tokenizer = load_tokenizer(data, vocab_size)
    report_once = unique_notices(line)
    prompts = train_prompts(data, tokenizer, seed, report_once)
    settings = data, scored.evaluation, tokenizer, seed
    sets = {one.name: one.prompts for one in evaluation_sets(*settings, None, report_once)}
    splits = {"training": prompts, "held out": sets.pop(HELDOUT, []), **sets}
    for name, split in splits.items():
        labels = Counter(prompt.label for prompt in split)
        parts = ", ".join(f"{label} {count:,}" for label, count in labels.most_common(10))
        line(f"{name}: {len(split):,} prompts ({parts})" if split else f"{name}: none")
    for text in missing_requests(
        data, scored.rewards.answer_tag, prompts, partial(tokenizer.decode, special=True)
    ):
        for part in textwrap.wrap(text, max(console.width, 40), break_on_hyphens=False):
            line(part)
    lengths = [len(p.tokens) for p in prompts if p.turns != EPISODE]
    for text in histogram(lengths, scored.rollout.prompt_buckets) if lengths else ():
        line(text)
    for prompt in prompts[:most]:
        _show(line, prompt, tokenizer, console.width)
    every = [prompt for split in splits.values() for prompt in split]
    try_rows(scored.rewards, data, every)
    return _judge(scored, prompts, line)


def histogram(lengths: Sequence[int], buckets: Sequence[int]) -> list[str]:
    """Returns a line for each bucket with the number of its prompts, and one for longer ones."""
    sizes = np.asarray(lengths)
    edges = [0, *buckets]
    lines = [
        f"tokens: shortest {sizes.min()}, median {int(np.median(sizes))}, longest {sizes.max()}"
    ]
    counts = [int(((sizes > a) & (sizes <= b)).sum()) for a, b in zip(edges, buckets, strict=False)]
    over = int((sizes > buckets[-1]).sum())
    for bucket, count in zip(buckets, counts, strict=True):
        bar = "█" * round(_BAR * count / len(sizes))
        lines.append(f"  up to {bucket:6} {count:7,} {bar}".rstrip())
    if over:
        lines.append(f"  longer       {over:7,} than rollout.prompt_buckets[-1] = {buckets[-1]}")
    return lines


def _show(line, prompt: Prompt, tokenizer: Tokenizer, width: int) -> None:
    width = max(min(width, 110), 40)
    line("─" * min(width, 80))
    if prompt.turns == EPISODE:
        line(f"{prompt.label}, the prompt of an episode's row; compass try plays one:")
        text = prompt.question
    else:
        line(f"{prompt.label}, {len(prompt.tokens)} tokens, as the model reads them:")
        text = tokenizer.decode(prompt.tokens, special=True)
    for row in text.splitlines():
        for part in text_lines("", row, width, _WHOLE):
            line(part)
    if prompt.answer:
        line(text_lines("truth", str(prompt.answer), width, 1)[0])


def _judge(scored: ScoredConfig, prompts: Sequence[Prompt], line) -> float | None:
    """Returns the share of judged ground truths that their own verifier finds right."""
    answered = [prompt for prompt in prompts if prompt.answer and prompt.turns != EPISODE]
    if not answered:
        return None
    judged = answered[:MOST_REFERENCES]
    tag = scored.rewards.answer_tag
    responses = [
        f"<{tag}>{prompt.answer}</{tag}>" if tag else str(prompt.answer) for prompt in judged
    ]
    with open_scorer(scored.rewards, scored.data) as scorer:
        for n, prompt in enumerate(judged):
            scorer.submit(n, prompt, responses[n])
        scores: dict[Any, Score] = {}
        while len(scores) < len(judged):
            scores.update(scorer.collect(block=True))
    at = scored.rewards.right_at
    known = [n for n, x in sorted(scores.items()) if x.known]
    wrong = [n for n in known if scores[n].reward < at]
    line("─" * 80)
    if without := len(prompts) - len(answered):
        line(f"{without:,} of {len(prompts):,} prompts have no ground truth: they are not judged")
    if lost := [x for _, x in sorted(scores.items()) if not x.known]:
        line(f"{len(lost)} of {len(judged)} answers have no verdict: {_reason(lost[0])}")
    if not known:
        return None
    right = len(known) - len(wrong)
    line(f"ground truths that their own verifier finds right: {right} of {len(known)}")
    if wrong:
        n = wrong[0]
        line(
            f"  not right: reward {scores[n].reward:g}, below rewards.right_at = {at:g}, for the"
            f" response {responses[n]!r:.80} to {judged[n].question!r:.100}"
        )
        line("  look at the verifier, at rewards.right_at and at the field of the ground truth")
    return right / len(known)


def _reason(score: Score) -> str:
    """Returns the reason why a score is unknown."""
    if score.outcome == "unjudged":
        return "unjudged: a verifier returned None; does it end with a return?"
    return summary(score.detail) if score.detail else score.outcome
