"""The prompts of RL and evaluation: questions (questions.py) of one split or the other, which went
through the chat template and are tokenised.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compass_jax.config import ConfigError, DataConfig, RunConfig
from compass_jax.config.data import HELDOUT
from compass_jax.data.files import DataError
from compass_jax.data.questions import Question, Tell, at_most, evaluation_questions, questions
from compass_jax.data.splits import heldout_origin
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError
from compass_jax.records import Prompt

logger = logging.getLogger(__name__)


class PromptTooLong(DataError):
    """A prompt has more tokens than the longest prompt bucket."""


def to_prompts(questions: Sequence[Question], tokenizer: Tokenizer) -> list[Prompt]:
    """Tokenises questions. Raises TokenizerError, with the messages, where the template refuses
    one.
    """

    def encoded(question: Question) -> list[int]:
        try:
            return tokenizer.encode_chat(question.messages, tools=question.tools)
        except TokenizerError as error:
            messages = str(list(question.messages))[:200]
            raise TokenizerError(f"{error}; they are {messages}") from error

    return [
        Prompt(
            id=question.id,
            source=question.source,
            label=question.label,
            question=question.text,
            tokens=np.asarray(encoded(question), np.int32),
            answer=question.answer,
            row=question.row,
            labels=question.labels,
            turns=question.turns,
            place=question.place,
        )
        for question in questions
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
            f" {config.heldout_frac} holds all of them out, or all are evaluated on"
        )
    return to_prompts(chosen, tokenizer)


def heldout_prompts(
    config: DataConfig, tokenizer: Tokenizer, seed: int, tell: Tell = logger.warning
) -> list[Prompt]:
    """`data.eval_prompts` held-out prompts, each label with its share of what is available, in the
    sources' order; those of `data.eval_sources`, where there are any.

    Fewer available: all of them, and that is told where they are a part of `data.sources` and the
    number is not the default, as is what `questions` tells. None available: DataError (none asked
    for: an empty list).
    """
    if config.eval_prompts == 0:
        return []
    if config.eval_sources:
        available = evaluation_questions(config, seed, tell)
    else:
        own = range(len(config.sources))
        available = [x for x in questions(config, seed, tell) if x.heldout and x.source in own]
    if not available:
        raise DataError(
            f"no held-out prompts: raise data.heldout_frac = {config.heldout_frac} or the sources'"
            " sizes, or set data.eval_prompts to 0"
        )
    asked = config.eval_prompts != type(config).eval_prompts
    if asked and len(available) < config.eval_prompts and not config.eval_sources:
        tell(
            f"only {len(available)} held-out prompts are available, data.eval_prompts asks "
            f"for {config.eval_prompts}"
        )
    return to_prompts(at_most(config.eval_prompts, available), tokenizer)


class PromptSet(NamedTuple):
    """Prompts that are evaluated together and counted by themselves, under a name."""

    name: str
    prompts: list[Prompt]
    k: int  # samples of each prompt, beside a greedy answer
    temperature: float


def evaluation_sets(
    config: RunConfig, tokenizer: Tokenizer, tell: Tell = logger.warning, whole: bool = False
) -> list[PromptSet]:
    """What a run is evaluated on: the held-out prompts under the name HELDOUT, where there are any,
    then `data.eval_sets`; empty where nothing is asked for.

    Prompts that are too long are left out or refused as `fitting` says, unless `whole`. Raises
    DataError for a set without prompts, ConfigError where a set has the name of a label of held-out
    prompts.
    """
    data, usual = config.data, config.evaluation

    def fit(prompts: list[Prompt]) -> list[Prompt]:
        longest = config.rollout.prompt_buckets[-1]
        return prompts if whole else fitting(prompts, longest, data.overlong, tell)

    found: list[PromptSet] = []
    if held := heldout_prompts(data, tokenizer, config.seed, tell):
        found.append(PromptSet(HELDOUT, fit(held), usual.k, usual.temperature))
    pool = questions(data, config.seed, tell) if data.eval_sets else []
    for one, place in zip(data.eval_sets, data.set_places(), strict=True):
        if one.name in {prompt.label for prompt in held}:
            raise ConfigError(
                f"data.eval_sets, {one.name}: held-out prompts have this label, so that two metrics"
                f" would be called eval/{one.name}/avg_at_k; give the set another name"
            )
        mine = [question for question in pool if question.source in place]
        prompts = to_prompts(mine, tokenizer)
        temperature = usual.temperature if one.temperature is None else one.temperature
        found.append(PromptSet(one.name, fit(prompts), one.k or usual.k, temperature))
    return found


def in_words(sets: Sequence[PromptSet], data: DataConfig) -> str:
    """Returns "512 held out (test split), gsm8k 1,319"; "0 held out" where there is nothing."""
    counts = {one.name: len(one.prompts) for one in sets}
    told = [f"{counts.pop(HELDOUT, 0):,} held out{heldout_origin(data)}"]
    return ", ".join([*told, *(f"{name} {count:,}" for name, count in counts.items())])


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
