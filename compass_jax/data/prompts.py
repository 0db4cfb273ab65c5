"""The prompts of RL and evaluation: from reasoning-gym's datasets, or from JSONL and Parquet files.

1. Every source gives its distinct questions (`questions`), the same for the same configuration and
   seed. Two rows of a file are the same where all their messages are, character by character: white
   space is part of code, and the system turn of the task.
2. A hash of the question's text alone decides whether it is held out, so neither another seed nor
   another source with the same question can move it into training. White space is normalised there,
   and system turns are left out, so that rows which differ in these alone fall on the same side: no
   question is in both splits.
3. Instruction, question and system prompt go through the chat template and are tokenised.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compass_jax.config import DataConfig, FileSource, ProceduralSource
from compass_jax.data.files import DataError, check_messages, read_rows, refuse_blank
from compass_jax.data.procedural import distinct_entries, encode_item, normalised
from compass_jax.data.stream import PromptStream
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.records import Prompt, stable_id

__all__ = [
    "DataError",
    "PromptStream",
    "PromptTooLong",
    "Question",
    "check_lengths",
    "heldout_prompts",
    "is_heldout",
    "questions",
    "train_prompts",
]

logger = logging.getLogger(__name__)
Tell = Callable[[str], None]  # shows a person one line


class PromptTooLong(DataError):
    """A prompt has more tokens than the longest prompt bucket."""


@dataclass(frozen=True)
class Question:
    """A question before tokenisation. `entry` is the procedural dataset's own; None for a file's
    row.
    """

    id: int
    source: int
    label: str
    text: str
    messages: tuple[dict[str, str], ...]  # what the chat template gets
    answer: str
    entry: dict[str, Any] | None
    heldout: bool


def is_heldout(question: str, heldout_frac: float) -> bool:
    """Whether a question belongs to the held-out split: a hash of its text, white space normalised,
    and of nothing else.
    """
    digest = hashlib.blake2b(
        b"held-out split:" + normalised(question).encode(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") % 10_000 < heldout_frac * 10_000


def questions(config: DataConfig, seed: int, tell: Tell = logger.warning) -> list[Question]:
    """All questions of all sources, both splits, in a fixed order; distinct within a source; ids
    distinct overall.

    `tell` gets a line for each file with rows that were left out.
    """
    found: list[Question] = []
    used: set[int] = set()
    for index, source in enumerate(config.sources):
        drawn = (
            _procedural(config, index, source, seed)
            if isinstance(source, ProceduralSource)
            else _from_file(config, index, source, tell)
        )
        for question in drawn:
            number = question.id
            while number in used:  # a 32-bit collision, or one label used by two sources
                number = (number + 1) % 2**32
            used.add(number)
            found.append(replace(question, id=number))
    return found


def _procedural(
    config: DataConfig, index: int, source: ProceduralSource, seed: int
) -> Iterator[Question]:
    label = source.label or source.dataset
    for entry in distinct_entries(source, seed):
        text = entry["question"]
        asked = f"{source.instruction}\n{text}" if source.instruction else text
        # some tasks have many right answers and name none
        answer = "" if entry["answer"] is None else str(entry["answer"])
        yield _question(
            config, index, label, text, [{"role": "user", "content": asked}], answer, entry
        )


def _from_file(
    config: DataConfig, index: int, source: FileSource, tell: Tell
) -> Iterator[Question]:
    """The distinct prompts of a file. Of rows with the same messages the first counts.

    A second answer to the same prompt is a contradiction that the file alone cannot settle. It is
    told with its place and does not end the run: one of 100,000 rows would make the file useless,
    and to drop the first too would let a bad row remove a good one.
    """
    label = source.label or source.path.rsplit("/", 1)[-1].rsplit(".", 1)[0]
    prompt_field, answer_field = source.prompt_field, source.answer_field
    fields = {
        name: f"add it or set data.sources[{index}].{key}"
        for key, name in (("prompt_field", prompt_field), ("answer_field", answer_field))
    }
    first: dict[str, tuple[str, str]] = {}  # messages -> answer, place
    repeats = 0
    contradictions: list[str] = []
    for where, row in read_rows(source.path, fields):
        text, messages = _asked(row[prompt_field], f"{where}, field {prompt_field!r}")
        answer = _answer(row[answer_field], f"{where}, field {answer_field!r}")
        question = _question(config, index, label, text, messages, answer, None)
        key = hashlib.blake2b(json.dumps(question.messages).encode(), digest_size=16).hexdigest()
        if key not in first:
            first[key] = (answer, where)
            yield question
        elif first[key][0] == answer:
            repeats += 1
        else:
            answers = f"{first[key][0]!r:.40} in {first[key][1]}, {answer!r:.40} in {where}"
            contradictions.append(f"{text!r:.60} ({answers})")
    if repeats:
        tell(
            f"{source.path}: {repeats} rows repeat an earlier prompt with its answer; they "
            "are left out"
        )
    if contradictions:
        tell(
            f"{source.path}: {len(contradictions)} rows give another answer to an earlier "
            f"prompt; the first answer is used: {contradictions[0]}"
        )


def _question(
    config: DataConfig,
    index: int,
    label: str,
    text: str,
    asked: list[dict[str, str]],
    answer: str,
    entry: dict[str, Any] | None,
) -> Question:
    messages = asked
    if config.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    heldout = is_heldout(text, config.heldout_frac)
    own_system = [message["content"] for message in asked if message["role"] == "system"]
    return Question(
        stable_id("\n".join([label, *own_system, text])),
        index,
        label,
        text,
        tuple(messages),
        answer,
        entry,
        heldout,
    )


def _asked(prompt: Any, where: str) -> tuple[str, list[dict[str, str]]]:
    """(question, messages) of a row. The question of a longer conversation is all its turns but the
    system's.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: empty; delete the row or write the question")
        return prompt, [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise DataError(
            f"{where}: a {type(prompt).__name__}; it must be text or a list of chat messages"
        )
    messages = check_messages(prompt, where)
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: ends with an assistant message; it must end with what is asked")
    if not any(message["role"] == "user" for message in messages):
        raise DataError(
            f"{where}: no message of role 'user': nothing is asked; add one or delete the row"
        )
    refuse_blank(messages, "user", where, "nothing is asked")
    return (
        "\n".join(message["content"] for message in messages if message["role"] != "system"),
        messages,
    )


def _answer(answer: Any, where: str) -> str:
    whole = isinstance(answer, int) and not isinstance(answer, bool)
    real = isinstance(answer, float) and math.isfinite(answer)
    if not whole and not real and not (isinstance(answer, str) and answer.strip()):
        raise DataError(
            f"{where}: {answer!r:.80} is no reference answer; it must be text or a finite number"
        )
    return str(answer)


def _to_prompts(questions: Sequence[Question], tokenizer: Tokenizer) -> list[Prompt]:
    encoded = tokenizer.encode_chats(
        [question.messages for question in questions], add_generation_prompt=True
    )
    return [
        Prompt(
            id=question.id,
            source=question.source,
            label=question.label,
            question=question.text,
            tokens=np.asarray(ids, np.int32),
            answer=question.answer,
            item="" if question.entry is None else encode_item(question.entry),
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
    sources' order.

    Fewer available: all of them, and that is told, as is what `questions` tells. None available:
    DataError (none asked for: an empty list).
    """
    if config.eval_prompts == 0:
        return []
    available = [question for question in questions(config, seed, tell) if question.heldout]
    if not available:
        raise DataError(
            f"no held-out prompts: raise data.heldout_frac = {config.heldout_frac} or the sources'"
            " sizes, or set data.eval_prompts to 0"
        )
    if len(available) < config.eval_prompts:
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


def check_lengths(prompts: Sequence[Prompt], longest: int) -> None:
    """Raises PromptTooLong, naming the longest prompt, if any has more than `longest` tokens."""
    too_long = [prompt for prompt in prompts if len(prompt.tokens) > longest]
    if too_long:
        worst = max(too_long, key=lambda prompt: len(prompt.tokens))
        raise PromptTooLong(
            f"{len(too_long)} of {len(prompts)} prompts are longer than the longest bucket of"
            f" {longest} tokens; the longest has {len(worst.tokens)} tokens ({worst.label}:"
            f" {worst.question!r:.120}). Raise the last value of rollout.prompt_buckets to"
            f" {len(worst.tokens)} or drop these prompts"
        )
