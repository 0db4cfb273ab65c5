"""The prompts of RL and evaluation: questions (questions.py) of one split or the other, which went
through the chat template and are tokenised.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from compass_jax.config import DataConfig
from compass_jax.data.files import DataError
from compass_jax.data.questions import Question, Tell, evaluation_questions, questions
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.records import Prompt

logger = logging.getLogger(__name__)


class PromptTooLong(DataError):
    """A prompt has more tokens than the longest prompt bucket."""


def _to_prompts(questions: Sequence[Question], tokenizer: Tokenizer) -> list[Prompt]:
    encoded = tokenizer.encode_chats(
        [question.messages for question in questions],
        add_generation_prompt=True,
        tools=[question.tools for question in questions],
    )
    return [
        Prompt(
            id=question.id,
            source=question.source,
            label=question.label,
            question=question.text,
            tokens=np.asarray(ids, np.int32),
            answer=question.answer,
            row=question.row,
            labels=question.labels,
            turns=question.turns,
        )
        for question, ids in zip(questions, encoded, strict=True)
    ]


def train_prompts(
    config: DataConfig, tokenizer: Tokenizer, seed: int, tell: Tell = logger.warning
) -> list[Prompt]:
    """All prompts of the training split. `tell` is that of `questions`. Raises DataError if there
    is none.
    """
    chosen = [question for question in questions(config, seed, tell) if not question.heldout]
    if not chosen:
        raise DataError(
            "no training prompts: data.sources are empty, or data.heldout_frac ="
            f" {config.heldout_frac} holds all of them out"
        )
    return _to_prompts(chosen, tokenizer)


def heldout_prompts(
    config: DataConfig, tokenizer: Tokenizer, seed: int, tell: Tell = logger.warning
) -> list[Prompt]:
    """`data.eval_prompts` held-out prompts, each label with its share of what is available, in the
    sources' order; those of `data.eval_sources`, where there are any.

    Fewer available: all of them, and that is told where they are a part of `data.sources`, as is
    what `questions` tells. None available: DataError (none asked for: an empty list).
    """
    if config.eval_prompts == 0:
        return []
    if config.eval_sources:
        available = evaluation_questions(config, seed, tell)
    else:
        available = [question for question in questions(config, seed, tell) if question.heldout]
    if not available:
        raise DataError(
            f"no held-out prompts: raise data.heldout_frac = {config.heldout_frac} or the sources'"
            " sizes, or set data.eval_prompts to 0"
        )
    if len(available) < config.eval_prompts and not config.eval_sources:
        tell(
            f"only {len(available)} held-out prompts are available, data.eval_prompts asks "
            f"for {config.eval_prompts}"
        )
    left = _shares(Counter(question.label for question in available), config.eval_prompts)
    chosen = []
    for question in available:
        if left[question.label] > 0:
            left[question.label] -= 1
            chosen.append(question)
    return _to_prompts(chosen, tokenizer)


def _shares(available: Counter[str], wanted: int) -> dict[str, int]:
    """Largest-remainder apportionment of `wanted` over labels in proportion to what each has; ties
    go to the earlier label.
    """
    total = sum(available.values())
    wanted = min(wanted, total)
    shares = {label: wanted * count // total for label, count in available.items()}
    by_remainder = sorted(available, key=lambda label: -(wanted * available[label] % total))
    for label in by_remainder[: wanted - sum(shares.values())]:
        shares[label] += 1
    return shares


def fitting(
    prompts: Sequence[Prompt], longest: int, overlong: str, tell: Tell = logger.warning
) -> list[Prompt]:
    """The prompts of at most `longest` tokens. The others are counted in a line that `tell` gets;
    with `overlong` = "refuse" they raise PromptTooLong, and so they do where nothing is left.
    """
    too_long = [prompt for prompt in prompts if len(prompt.tokens) > longest]
    if not too_long:
        return list(prompts)
    worst = max(too_long, key=lambda prompt: len(prompt.tokens))
    what = (
        f"{len(too_long)} of {len(prompts)} prompts are longer than rollout.prompt_buckets[-1] ="
        f" {longest} tokens"
    )
    longest_one = (
        f"the longest has {len(worst.tokens)} tokens ({worst.label}: {worst.question!r:.120})"
    )
    everything = len(too_long) == len(prompts)
    if everything or overlong == "refuse":
        or_drop = "" if everything else ", or set data.overlong to 'drop'"
        raise PromptTooLong(
            f"{what}; {longest_one}. Raise the last value of rollout.prompt_buckets to"
            f" {len(worst.tokens)}{or_drop}"
        )
    tell(f"{what} and are left out; {longest_one}")
    return [prompt for prompt in prompts if len(prompt.tokens) <= longest]
