"""SFT examples: conversations, or prompts with responses, from files; and worked solutions of
procedural training questions.

Exact duplicates, examples longer than the longest bucket and examples with a held-out question are
dropped and counted. RL may train on the same questions; held-out questions are in neither. All
examples are in memory here; data/streamed.py reads the rows of large files on demand.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from compass_jax.base.aliases import JsonObject
from compass_jax.config import DataConfig, ProceduralSource, ScoredConfig, SFTConfig
from compass_jax.data.files import (
    BadRows,
    DataError,
    OnBadRow,
    field_of,
    label_among,
    read_rows,
    refuse,
)
from compass_jax.data.formats import TURNS, Reading, open_format, tools_of, turns_of
from compass_jax.data.messages import INSTRUCTIONS, Messages, check_messages, refuse_blank
from compass_jax.data.preferences import asked_in_both_orders
from compass_jax.data.procedural import normalised
from compass_jax.data.questions import Question, Tell, heldout_texts, questions, sets_asked
from compass_jax.data.splits import tell_splits, training_files
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError
from compass_jax.data.worked import known_datasets, worked_solution

logger = logging.getLogger(__name__)
BESIDE = ("tools", "system")  # optional columns of a row


class Conversation(NamedTuple):
    """The source of an example."""

    where: str
    label: str
    messages: Messages
    times: int = 1  # number of repetitions
    tools: Sequence[JsonObject] = ()
    asks: str = ""  # the question, if it is not the user's messages
    context: int = 0  # number of first messages that are not trained


@dataclass(frozen=True)
class SFTExample:
    """One tokenised conversation. `mask` selects the assistant's tokens, including end tokens, for
    the loss.

    If the chat template rewrites earlier turns, `tokens` concatenates several sequences, each with
    the context in which its assistant messages are sampled.
    """

    tokens: np.ndarray  # int32 [t]
    mask: np.ndarray  # bool [t]
    label: str  # the file's name without its ending, or the data source's label
    sizes: tuple[int, ...] = ()  # tokens of each sequence; empty for a single one

    @classmethod
    def of(cls, parts: Sequence[tuple[np.ndarray, np.ndarray]], label: str) -> SFTExample:
        """Returns the example of these sequences, each (tokens, mask)."""
        tokens, mask = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        sizes = tuple(len(ids) for ids, _ in parts) if len(parts) > 1 else ()
        return cls(tokens, mask, label, sizes)

    def sequences(self) -> list[SFTExample]:
        """Returns each sequence as a separate example."""
        if not self.sizes:
            return [self]
        ends = np.cumsum(self.sizes)[:-1]
        parts = zip(np.split(self.tokens, ends), np.split(self.mask, ends), strict=True)
        return [SFTExample(tokens, mask, self.label) for tokens, mask in parts]

    @property
    def size(self) -> int:
        """Number of tokens of all sequences."""
        return len(self.tokens)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(self.sizes, default=self.size)

    @property
    def key(self) -> str:
        """A digest of the tokens and masks."""
        sizes = str(self.sizes).encode() if self.sizes else b""
        content = self.tokens.tobytes() + self.mask.tobytes() + sizes
        return hashlib.blake2b(content, digest_size=16).hexdigest()


def sft_examples(
    sft: SFTConfig,
    scored: ScoredConfig,
    tokenizer: Tokenizer,
    tell: Tell = logger.warning,
) -> tuple[list[SFTExample], dict[str, int]]:
    """Returns the examples of `sft` and their counts.

    The counts are examples, duplicates, too_long, heldout (the last three are dropped), bad (if
    rows are skipped), tokens, assistant_tokens, and "from/<label>" for each label before
    repetition. `tell` receives lines on dropped examples and on `data.eval_sets`.

    Raises DataError for a file or label that cannot be used, or if no example remains.
    """
    tell_splits((*sft.files, *sft.preferences), tell)
    pool = questions(scored.data, scored.seed, tell)
    heldout_questions, matched = heldout_texts(pool), set[str]()
    counts: Counter[str] = Counter(duplicates=0, too_long=0, heldout=0)
    seen: set[str] = set()
    examples: list[SFTExample] = []
    bad = BadRows(sft.bad_rows == "skip", tell)
    of_files = conversations(sft, scored.data.system_prompt, tell, bad)
    other_rows = other_conversations(sft, scored.data, scored.rewards.answer_tag, pool, tell)
    for row in chain(of_files, other_rows):
        if matches := heldout_questions.intersection(asks(row)):
            counts["heldout"] += 1
            matched |= matches
            continue
        try:
            example = example_of(row, tokenizer)
        except DataError as error:
            bad(error)
            continue
        if example.key in seen:
            counts["duplicates"] += 1
        elif example.longest > sft.buckets[-1]:
            counts["too_long"] += 1
        else:
            examples += [example] * row.times
            counts[f"from/{row.label}"] += 1
        seen.add(example.key)
    if line := sets_asked(scored.data, pool, matched):
        tell(line)
    counts.update(
        examples=len(examples),
        tokens=sum(len(e.tokens) for e in examples),
        assistant_tokens=sum(int(e.mask.sum()) for e in examples),
    )
    if bad.count:
        counts["bad"] = bad.count
    _tell_dropped(sft, counts, tell)
    return examples, dict(counts)


def _tell_dropped(sft: SFTConfig, counts: Counter[str], tell: Tell) -> None:
    reasons = {"duplicates": "repeat an earlier one"}
    reasons["too_long"] = f"are longer than sft.buckets[-1] = {sft.buckets[-1]} tokens"
    reasons["heldout"] = "ask a held-out question"
    if not counts["examples"]:
        reasons["bad"] = "cannot be used (sft.bad_rows)"
        dropped = ", ".join(f"{counts[name]} {reason}" for name, reason in reasons.items())
        raise DataError(
            f"no SFT examples are left of sft.files = {sft.files}, sft.preferences ="
            f" {sft.preferences}, sft.procedural = {sft.procedural} and sft.answers ="
            f" {sft.answers}: {dropped}"
        )
    for name, reason in reasons.items():
        if counts[name]:
            tell(f"{counts[name]} SFT examples {reason} and are left out")


def asks(row: Conversation) -> Iterator[str]:
    """Yields the questions of an example in the form in which held-out questions are compared."""
    yield from (normalised(m["content"]) for m in row.messages if m["role"] == "user")
    if row.asks:
        yield normalised(row.asks)


def example_of(row: Conversation, tokenizer: Tokenizer) -> SFTExample:
    """Returns the tokens of a conversation. Raises DataError if the tokenizer refuses it."""
    try:
        parts = tokenizer.encode_turns(row.messages, row.tools, row.context)
        return SFTExample.of(parts, row.label)
    except TokenizerError as error:
        raise DataError(f"{row.where}: {error}") from error


# ---- conversations -------------------------------------------------------------------------------


def conversations(
    sft: SFTConfig, system_prompt: str, tell: Tell, bad: OnBadRow = refuse
) -> Iterator[Conversation]:
    """Yields the conversations of `sft.files`, which begin with `system_prompt`. `tell` receives a
    line for each file with a detected format, `bad` the DataError of a row that cannot be used.
    """
    for label, path in labelled_files(sft):
        reading, fields = sft_reading(sft, path, tell)
        for where, row in read_rows(path, fields, BESIDE, bad):
            try:
                yield conversation_of(reading, where, row, label, system_prompt)
            except DataError as error:
                bad(error)


def labelled_files(sft: SFTConfig) -> Iterator[tuple[str, str]]:
    """Yields (label, file) of each training file of `sft.files`."""
    for pattern in sft.files:
        for path in training_files(pattern):
            yield label_among(pattern, dict(sft.weights)), path


def sft_reading(sft: SFTConfig, path: str, tell: Tell) -> tuple[Reading, dict[str, str]]:
    """Returns the columns to read from a file, and the remedy for each missing column."""
    named = (sft.prompt_field, sft.response_field or TURNS)
    return open_format(path, "response", named, ("sft.prompt_field", "sft.response_field"), tell)


def conversation_of(
    reading: Reading, where: str, row: JsonObject, label: str, system: str
) -> Conversation:
    """Returns the conversation of one row. Raises DataError if it has nothing to learn."""
    context, response = taught(reading, where, row, system)
    refuse_blank(response, "assistant", where, "an empty answer would be learnt", len(context))
    if not any(message["role"] == "assistant" for message in response):
        raise DataError(
            f"{where}: no assistant message: there is nothing to learn from; add one or"
            " delete the row"
        )
    messages, tools = [*context, *response], tools_of(row, where)
    return Conversation(where, label, messages, tools=tools, context=len(context))


def taught(reading: Reading, where: str, row: JsonObject, system: str) -> tuple[Messages, Messages]:
    """Returns (context, response) of a row. All assistant messages of the response are trained, and
    none of the context.

    They are the prompt as RL would render it and its response; for a complete conversation the
    context is empty. Raises DataError, which names the place, for a row without a conversation.
    """
    prompt = field_of(row, reading.prompt)
    if reading.target == TURNS:
        return [], check_messages(turns_of(prompt, row, where), where)
    place = f"{where}, field {reading.prompt!r}"
    prompt = turns_of(prompt, row, place)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    prompt = check_messages(prompt, place)
    if system and prompt[0]["role"] not in INSTRUCTIONS:
        prompt = [{"role": "system", "content": system}, *prompt]
    place = f"{where}, field {reading.target!r}"
    response = turns_of(field_of(row, reading.target), {}, place)
    if isinstance(response, str):
        response = [{"role": "assistant", "content": response}]
    response = check_messages(response, place)
    if prompt[-1]["role"] == response[0]["role"] == "assistant":
        raise DataError(
            f"{place}: it goes on with the assistant message that ends {reading.prompt!r}; write"
            " the whole message into one of the two"
        )
    return prompt, response


def other_conversations(
    sft: SFTConfig, data: DataConfig, tag: str, pool: Sequence[Question], tell: Tell
) -> Iterator[Conversation]:
    """Yields the conversations from sources other than `sft.files`: a judge's verdicts on pairs in
    both orders; worked solutions, then bare answers, of the first training questions of each
    configured label. tag: of answers (rewards.answer_tag).
    """
    for pattern in sft.preferences:
        label = label_among(pattern, dict(sft.weights))
        for one in asked_in_both_orders(pattern, training_files):
            messages = [*one.messages, {"role": "assistant", "content": one.taught}]
            yield Conversation(one.pair.where, label, messages, asks=one.pair.question)
    for key in ("procedural", "answers"):
        for i, (label, count, times) in enumerate(getattr(sft, key)):
            where = f"sft.{key}[{i}] ({label!r})"
            _check_label(data, label, where, worked=key == "procedural")
            of_label = (x for x in pool if x.label == label and x.entry and not x.heldout)
            chosen = list(islice(of_label, count))
            if len(chosen) < count:
                available = f"only {len(chosen)} training questions are available"
                tell(f"{where}: {available}, {count} were asked for")
            for question in chosen:
                solution = f"<{tag}>{question.answer}</{tag}>" if tag else question.answer
                source = data.sources[question.source]
                assert isinstance(source, ProceduralSource) and question.entry
                if key == "procedural":
                    solution = worked_solution(source.dataset, question.entry)
                messages = [*question.messages, {"role": "assistant", "content": solution}]
                yield Conversation(where, label, messages, times)


def _check_label(data: DataConfig, label: str, where: str, worked: bool) -> None:
    datasets: dict[str, set[str]] = {}  # by label; two sources may share one
    for source in data.sources:
        if isinstance(source, ProceduralSource):
            datasets.setdefault(source.label or source.dataset, set()).add(source.dataset)
    if label not in datasets:
        raise DataError(
            f"{where}: no procedural data source has this label; labels:"
            f" {', '.join(sorted(datasets)) or 'none'}"
        )
    if worked and (missing := datasets[label] - set(known_datasets())):
        raise DataError(
            f"{where}: no worked solutions for {', '.join(sorted(missing))}; there are some"
            f" for: {', '.join(known_datasets())}"
        )
