"""The tokenised prompts of RL and evaluation, made from the questions (questions.py) of either
split with the chat template.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compass_jax.base.records import EPISODE, Prompt
from compass_jax.config import ConfigError, DataConfig, EvalConfig
from compass_jax.config.data import HELDOUT
from compass_jax.data.files import DataError
from compass_jax.data.questions import Question, Tell, at_most, evaluation_questions, questions
from compass_jax.data.splits import heldout_origin
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError

logger = logging.getLogger(__name__)


class PromptTooLong(DataError):
    """A prompt has more tokens than the longest prompt bucket."""


def to_prompts(questions: Sequence[Question], tokenizer: Tokenizer) -> list[Prompt]:
    """Tokenises questions. Raises TokenizerError for one that the template refuses."""

    names = ("id", "source", "label", "answer", "row", "labels", "turns", "place")
    prompts = []
    for question in questions:
        try:
            ids = [0]  # a placeholder
            if question.turns != EPISODE:
                ids = tokenizer.encode_chat(question.messages, tools=question.tools)
        except TokenizerError as error:
            messages = str(list(question.messages))[:200]
            raise TokenizerError(f"{error}; they are {messages}") from error
        fields = {name: getattr(question, name) for name in names}
        tokens = np.asarray(ids, np.int32)
        prompts.append(Prompt(question=question.text, tokens=tokens, **fields))
    return prompts


def train_prompts(
    config: DataConfig, tokenizer: Tokenizer, seed: int, tell: Tell = logger.warning
) -> list[Prompt]:
    """Returns the prompts of the training split. Raises DataError if it is empty."""
    training = [question for question in questions(config, seed, tell) if not question.heldout]
    if not training:
        raise DataError(
            "no training prompts: data.sources are empty, or data.heldout_frac ="
            f" {config.heldout_frac} holds all of them out, or all are evaluated on"
        )
    return to_prompts(training, tokenizer)


def heldout_prompts(
    config: DataConfig, tokenizer: Tokenizer, seed: int, tell: Tell = logger.warning
) -> list[Prompt]:
    """Returns `data.eval_prompts` held-out prompts, proportionally for each label, in the sources'
    order. If `data.eval_sources` is set, the prompts come from there.

    If fewer are available, it returns all of them. `tell` reports this if they are a part of
    `data.sources` and the number is not the default. `tell` is also passed to `questions`. Raises
    DataError if no prompt is available, unless `data.eval_prompts` is 0.
    """
    if config.eval_prompts == 0:
        return []
    if config.eval_sources:
        available = evaluation_questions(config, seed, tell)
    else:
        indices = range(len(config.sources))
        available = [x for x in questions(config, seed, tell) if x.heldout and x.source in indices]
    if not available:
        raise DataError(
            f"no held-out prompts: raise data.heldout_frac = {config.heldout_frac} or the sources'"
            " sizes, or set data.eval_prompts to 0"
        )
    is_explicit = config.eval_prompts != type(config).eval_prompts
    if is_explicit and len(available) < config.eval_prompts and not config.eval_sources:
        tell(
            f"only {len(available)} held-out prompts are available, data.eval_prompts asks "
            f"for {config.eval_prompts}"
        )
    return to_prompts(at_most(config.eval_prompts, available), tokenizer)


class PromptSet(NamedTuple):
    """A named set of prompts that is evaluated and reported separately."""

    name: str
    prompts: list[Prompt]
    k: int  # samples per prompt, in addition to a greedy answer
    temperature: float


def evaluation_sets(
    data: DataConfig,
    defaults: EvalConfig,
    tokenizer: Tokenizer,
    seed: int,
    longest: int | None,
    tell: Tell = logger.warning,
) -> list[PromptSet]:
    """Returns the evaluation sets of a run: the held-out prompts under the name HELDOUT, if any,
    then `data.eval_sets`.

    Prompts of more than `longest` tokens are dropped or refused as in `fitting` (None: kept).
    Raises DataError for a set without prompts; ConfigError if a set has the name of a label of
    held-out prompts.
    """

    def fit(prompts: list[Prompt]) -> list[Prompt]:
        return prompts if longest is None else fitting(prompts, longest, data.overlong, tell)

    sets: list[PromptSet] = []
    if heldout := heldout_prompts(data, tokenizer, seed, tell):
        sets.append(PromptSet(HELDOUT, fit(heldout), defaults.k, defaults.temperature))
    pool = questions(data, seed, tell) if data.eval_sets else []
    for one, place in zip(data.eval_sets, data.set_places(), strict=True):
        if one.name in {prompt.label for prompt in heldout}:
            raise ConfigError(
                f"data.eval_sets, {one.name}: held-out prompts have this label, so that two metrics"
                f" would be called eval/{one.name}/avg_at_k; give the set another name"
            )
        members = [question for question in pool if question.source in place]
        prompts = to_prompts(members, tokenizer)
        temperature = defaults.temperature if one.temperature is None else one.temperature
        sets.append(PromptSet(one.name, fit(prompts), one.k or defaults.k, temperature))
    return sets


def in_words(sets: Sequence[PromptSet], data: DataConfig) -> str:
    """Returns "512 held out (test split), gsm8k 1,319"; "0 held out" without evaluation prompts."""
    counts = {one.name: len(one.prompts) for one in sets}
    parts = [f"{counts.pop(HELDOUT, 0):,} held out{heldout_origin(data)}"]
    return ", ".join([*parts, *(f"{name} {count:,}" for name, count in counts.items())])


def fitting(
    prompts: Sequence[Prompt], longest: int, overlong: str, tell: Tell = logger.warning
) -> list[Prompt]:
    """Returns the prompts of at most `longest` tokens. `tell` receives a line with the number of
    the others.

    Raises PromptTooLong if a prompt is too long and `overlong` is "refuse", or if no prompt
    remains.
    """
    too_long = [prompt for prompt in prompts if len(prompt.tokens) > longest]
    if not too_long:
        return list(prompts)
    longest_prompt = max(too_long, key=lambda prompt: len(prompt.tokens))
    summary = (
        f"{len(too_long)} of {len(prompts)} prompts are longer than rollout.prompt_buckets[-1] ="
        f" {longest} tokens"
    )
    size, question = len(longest_prompt.tokens), f"{longest_prompt.question!r:.120}"
    longest_one = f"the longest has {size} tokens ({longest_prompt.label}: {question})"
    none_fit = len(too_long) == len(prompts)
    if none_fit or overlong == "refuse":
        or_drop = "" if none_fit else ", or set data.overlong to 'drop'"
        raise PromptTooLong(
            f"{summary}; {longest_one}. Raise the last value of rollout.prompt_buckets to"
            f" {size}{or_drop}"
        )
    tell(f"{summary} and are left out; {longest_one}")
    return [prompt for prompt in prompts if len(prompt.tokens) <= longest]
