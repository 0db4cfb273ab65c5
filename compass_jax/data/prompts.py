"""The prompts of RL and evaluation: from reasoning-gym's datasets, or from JSONL and Parquet files.

1. Every source gives its distinct questions (`questions`), the same for the same configuration and seed.
2. A hash of the question's text alone decides whether it is held out, so neither another seed nor another source with
   the same question can move it into training.
3. Instruction, question and system prompt go through the chat template and are tokenised.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compass_jax.config import DataConfig, FileSource, ProceduralSource
from compass_jax.data.files import DataError, check_messages, read_rows
from compass_jax.data.procedural import distinct_entries, encode_item, normalised
from compass_jax.data.stream import PromptStream
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.records import Prompt, stable_id

__all__ = ["DataError", "PromptStream", "PromptTooLong", "Question", "check_lengths", "heldout_prompts", "is_heldout", "questions", "train_prompts"]

logger = logging.getLogger(__name__)


class PromptTooLong(DataError):
    """A prompt has more tokens than the longest prompt bucket."""


@dataclass(frozen=True)
class Question:
    """A question before tokenisation. `entry` is the procedural dataset's own; None for a file's row."""

    id: int
    source: int
    label: str
    text: str
    messages: tuple[dict[str, str], ...]  # what the chat template gets
    answer: str
    entry: dict[str, Any] | None
    heldout: bool


def is_heldout(question: str, heldout_frac: float) -> bool:
    """Whether a question belongs to the held-out split: a hash of its text, white space normalised, and of nothing else."""
    digest = hashlib.blake2b(b"held-out split:" + normalised(question).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 10_000 < heldout_frac * 10_000


def questions(config: DataConfig, seed: int) -> list[Question]:
    """All questions of all sources, both splits, in a fixed order; distinct within a source; ids distinct overall."""
    found: list[Question] = []
    used: set[int] = set()
    for index, source in enumerate(config.sources):
        draw = _procedural if isinstance(source, ProceduralSource) else _from_file
        for question in draw(config, index, source, seed):
            number = question.id
            while number in used:  # a 32-bit collision, or one label used by two sources
                number = (number + 1) % 2**32
            used.add(number)
            found.append(replace(question, id=number))
    return found


def _procedural(config: DataConfig, index: int, source: ProceduralSource, seed: int) -> Iterator[Question]:
    label = source.label or source.dataset
    for entry in distinct_entries(source, seed):
        text = entry["question"]
        asked = f"{source.instruction}\n{text}" if source.instruction else text
        answer = "" if entry["answer"] is None else str(entry["answer"])  # some tasks have many right answers and name none
        yield _question(config, index, label, text, [{"role": "user", "content": asked}], answer, entry)


def _from_file(config: DataConfig, index: int, source: FileSource, seed: int) -> Iterator[Question]:
    label = source.label or source.path.rsplit("/", 1)[-1].rsplit(".", 1)[0]
    seen: set[str] = set()
    repeats = 0
    for where, row in read_rows(source.path):
        for key, name in (("prompt_field", source.prompt_field), ("answer_field", source.answer_field)):
            if row.get(name) is None:
                raise DataError(f"{where}: no field {name!r} (fields: {', '.join(map(str, row))}); add it or set data.sources[{index}].{key}")
        text, messages = _asked(row[source.prompt_field], f"{where}, field {source.prompt_field!r}")
        if normalised(text) in seen:
            repeats += 1
            continue
        seen.add(normalised(text))
        yield _question(config, index, label, text, messages, _answer(row[source.answer_field], f"{where}, field {source.answer_field!r}"), None)
    if repeats:
        logger.warning("%s: %d rows repeat an earlier question; the first answer is used", source.path, repeats)


def _question(
    config: DataConfig, index: int, label: str, text: str, messages: list[dict[str, str]], answer: str, entry: dict[str, Any] | None
) -> Question:
    if config.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    heldout = is_heldout(text, config.heldout_frac)
    return Question(stable_id(label + "\n" + text), index, label, text, tuple(messages), answer, entry, heldout)


def _asked(prompt: Any, where: str) -> tuple[str, list[dict[str, str]]]:
    """(question, messages) of a row. The question of a longer conversation is all its turns but the system's."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: empty; delete the row or write the question")
        return prompt, [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise DataError(f"{where}: a {type(prompt).__name__}; it must be text or a list of chat messages")
    messages = check_messages(prompt, where)
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: ends with an assistant message; it must end with what is asked")
    return "\n".join(message["content"] for message in messages if message["role"] != "system"), messages


def _answer(answer: Any, where: str) -> str:
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)) or not str(answer).strip():
        raise DataError(f"{where}: {answer!r:.80} is no reference answer; it must be text or a number")
    return str(answer)


def _to_prompt(question: Question, tokenizer: Tokenizer) -> Prompt:
    return Prompt(
        id=question.id,
        source=question.source,
        label=question.label,
        question=question.text,
        tokens=np.asarray(tokenizer.encode_chat(question.messages, add_generation_prompt=True), np.int32),
        answer=question.answer,
        item="" if question.entry is None else encode_item(question.entry),
    )


def train_prompts(config: DataConfig, tokenizer: Tokenizer, seed: int) -> list[Prompt]:
    """All prompts of the training split. Raises DataError if there is none."""
    chosen = [question for question in questions(config, seed) if not question.heldout]
    if not chosen:
        raise DataError(f"no training prompts: data.sources are empty, or data.heldout_frac = {config.heldout_frac} holds all of them out")
    return [_to_prompt(question, tokenizer) for question in chosen]


def heldout_prompts(config: DataConfig, tokenizer: Tokenizer, seed: int) -> list[Prompt]:
    """`data.eval_prompts` held-out prompts, each label with its share of what is available, in the sources' order.

    Fewer available: all of them, and that is logged. None available: DataError (none asked for: an empty list).
    """
    if config.eval_prompts == 0:
        return []
    available = [question for question in questions(config, seed) if question.heldout]
    if not available:
        raise DataError(f"no held-out prompts: raise data.heldout_frac = {config.heldout_frac} or the sources' sizes, or set data.eval_prompts to 0")
    if len(available) < config.eval_prompts:
        logger.warning("only %d held-out prompts are available, data.eval_prompts asks for %d", len(available), config.eval_prompts)
    left = _shares(Counter(question.label for question in available), config.eval_prompts)
    chosen = []
    for question in available:
        if left[question.label] > 0:
            left[question.label] -= 1
            chosen.append(_to_prompt(question, tokenizer))
    return chosen


def _shares(available: Counter[str], wanted: int) -> dict[str, int]:
    """Largest-remainder apportionment of `wanted` over labels in proportion to what each has; ties go to the earlier label."""
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
            f"{len(too_long)} of {len(prompts)} prompts are longer than the longest bucket of {longest} tokens; "
            f"the longest has {len(worst.tokens)} tokens ({worst.label}: {worst.question!r:.120}). "
            f"Raise the last value of rollout.prompt_buckets to {len(worst.tokens)} or drop these prompts"
        )
