"""Which answer a response gives, for a vote among a prompt's samples: what verifiers compare with a
reference, in a form in which equal answers are equal texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from compass_jax.config.data import DataConfig, TaskSource
from compass_jax.config.verifiers import pairs
from compass_jax.records import Prompt
from compass_jax.tasks.rows import decode_row
from compass_jax.tasks.task import load_task
from compass_jax.verifiers.answers import exact
from compass_jax.verifiers.extract import extract_answer, final_answer, reference
from compass_jax.verifiers.kinds.choice import chosen
from compass_jax.verifiers.kinds.numeric import value_of

Vote = Callable[[Prompt, str], str | None]


def votes(data: DataConfig, tag: str) -> list[Vote | None]:
    """For each of `data.keyed_sources()` what reads the vote out of a response: None from it where
    there is no answer; None in its place where responses are not answers that could be equal
    (programs, conversations, what a function of one's own judges).

    tag: rewards.answer_tag.
    """
    return [_of_source(key, source, tag) for key, source in data.keyed_sources()]


def _of_source(key: str, source: Any, tag: str) -> Vote | None:
    if isinstance(source, TaskSource):
        verify = load_task(source.task, f"{key}.task").verify
        names = set(verify) if isinstance(verify, Mapping) else {verify}
    else:
        names = {name for name, _ in pairs(source.verifier)}
    if "choice" in names:
        return partial(_choice, dict(getattr(source, "verifier_args", ())), tag)
    readers = {"numeric": _number, "math": _final, "exact": _final, "reasoning_gym": _tagged}
    for name, read in readers.items():
        if name in names:
            return partial(read, tag)
    return None


def _choice(given: Mapping[str, Any], tag: str, prompt: Prompt, response: str) -> str | None:
    row = {**decode_row(prompt.row), **given}
    taken = {name: row[name] for name in ("choices", "options") if row.get(name)}
    return chosen(response, tag, **taken) or None


def _number(tag: str, prompt: Prompt, response: str) -> str | None:
    found = final_answer(response, tag)
    value = None if found is None else value_of(found)
    return None if value is None else str(value)


def _final(tag: str, prompt: Prompt, response: str) -> str | None:
    return _canonical(final_answer(response, tag))


def _tagged(tag: str, prompt: Prompt, response: str) -> str | None:
    return _canonical(extract_answer(response, tag))


def _canonical(text: str | None) -> str | None:
    """A plain number's value ("0.50" and "1/2" are equal); else the text, as it reads without case
    and white space.
    """
    if not text:
        return None
    text = reference(text)
    plain = exact(text)
    return str(plain[1]) if plain else "".join(text.split()).casefold().strip(".$")
