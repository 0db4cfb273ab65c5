"""Rows of published evaluation sets, as their files have them, made rows of a prompt, a reference
answer and what a verifier reads.

Each function gets a row, its place for messages and the path of its file, and returns the row with
"prompt" and perhaps "answer" and labels (tasks/rows.py) in it; it raises DataError for a row that
is not as the set's own documentation says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from compass_jax.data.asked import MOST_LABEL
from compass_jax.data.files import DataError, json_object
from compass_jax.untrusted import read_lines
from compass_jax.verifiers.extract import boxed

Row = dict[str, Any]
Make = Callable[[Row, str, str], Row]

_REGION = re.compile(r"(?:^|[^A-Za-z])([A-Za-z]{2}[-_][A-Za-z]{2})$")  # mmlu_DE-DE
_CHOOSE = (
    "Answer the following multiple-choice question. End with one line 'Answer: LETTER', where"
    " LETTER is one of {letters}.\n\n{question}\n\n{options}"
)
_TESTS = "{text}\nThe code must pass these tests:\n\n```python\n{tests}\n```"

_COMPLETE = (
    "Complete this Python function, and answer with all of it in a code block.\n\n```python\n"
)
# BFCL's names of types -> JSON schema's; "any" says nothing
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def mathematics(row: Row, where: str, path: str) -> Row:
    r"""A problem of MATH (arXiv 2103.03874): the reference is `answer`, else what the last
    \boxed{...} of `solution` holds; `type` or `subject` is the domain, `level` the difficulty.
    """
    answer = row.get("answer")
    if answer is None and (answer := boxed(_text(row, "solution", where))) is None:
        raise DataError(
            rf"{where}, field 'solution': holds no \boxed{{...}}, so that there is no reference;"
            " add the column 'answer'"
        )
    labels = {"domain": row.get("type") or row.get("subject"), "difficulty": row.get("level")}
    return _made(row, labels, prompt=row["problem"], answer=answer)


def human_eval(row: Row, where: str, path: str) -> Row:
    """A problem of HumanEval (arXiv 2107.03374), as gym/human_eval.py asks it."""
    names = ("task_id", "prompt", "test", "entry_point", "canonical_solution")
    return _made(row, {}, **program_row({name: _text(row, name, where) for name in names}))


def program_row(one: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a problem that has HumanEval's own columns."""
    return {
        "id": one["task_id"],
        "prompt": f"{_COMPLETE}{one['prompt']}```",
        "setup": one["prompt"],
        "test": one["test"],
        "entry_point": one["entry_point"],
        "answer": one["canonical_solution"],
    }


def mbpp(row: Row, where: str, path: str) -> Row:
    """A problem of MBPP (arXiv 2108.07732), of the whole set (`text`) or the sanitised one
    (`prompt`). The tests are shown: they alone say what the function is called.
    """
    text = _text(row, "text" if "text" in row else "prompt", where)
    tests = _texts(row, "test_list", where)
    if not tests:
        raise DataError(f"{where}, field 'test_list': is empty; a program is judged by its tests")
    imports = _texts(row, "test_imports", where) if row.get("test_imports") else []
    setup = "\n".join([*imports, row.get("test_setup_code") or ""]).strip()
    prompt = _TESTS.format(text=text, tests="\n".join(tests))
    return _made(row, {}, prompt=prompt, tests=tests, setup=setup, answer=row["code"])


def bfcl(row: Row, where: str, path: str) -> Row:
    """A request of BFCL of one turn, as gym/bfcl.py asks it. Its possible answers are the row's
    `ground_truth`, or in the file of the same name in the folder possible_answer beside it, as the
    set's own are; those of a file with "irrelevance" in its name are none.
    """
    asked, described = row["question"], row["function"]
    if not isinstance(asked, list) or not asked or not all(isinstance(x, list) for x in asked):
        raise DataError(f"{where}, field 'question': must be a list of turns, lists of messages")
    if len(asked) > 1:
        raise DataError(
            f"{where}: has {len(asked)} turns, and a row is one request; take the task"
            " compass_jax.gym.bfcl:multi_turn_base for such conversations"
        )
    if not isinstance(described, list):
        described = [described]
    wanted = ("name", "description", "parameters")
    for one in described:
        if not isinstance(one, Mapping) or any(name not in one for name in wanted):
            raise DataError(f"{where}, field 'function': each must have {', '.join(wanted)}")
    name, answer = str(row["id"]), row.get("ground_truth")
    if answer is None and "irrelevance" not in Path(path).name:
        answer = _possible(path, where).get(name)
        if answer is None:
            raise DataError(f"{where}: no possible answer has the id {name!r:.80}; add it")
    tools = [tool_of(one) for one in described]
    labels = {"domain": name.rpartition("_")[0] or name}
    return _made(row, labels, prompt=asked[0], tools=tools, answer=answer or [])


def _schema(value: Any) -> Any:
    """A description of BFCL's as JSON schema."""
    if isinstance(value, list):
        return [_schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    found = {key: _schema(one) for key, one in value.items()}
    if kind == "any":
        del found["type"]
    elif isinstance(kind, str):
        found["type"] = _TYPES.get(kind, kind)
    return found


def tool_of(described: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat templates show it."""
    told = {key: described[key] for key in ("name", "description")}
    return {
        "type": "function",
        "function": {**told, "parameters": _schema(described["parameters"])},
    }


@lru_cache(maxsize=4)
def _possible(path: str, where: str) -> dict[str, Any]:
    file = Path(path).parent / "possible_answer" / Path(path).name
    if not file.is_file():
        raise DataError(
            f"{where}: no field 'ground_truth', and there is no {file}; BFCL's possible answers are"
            " in a folder of this name"
        )
    rows = [(at, json_object(x, at)) for at, x in read_lines(file, error=DataError) if x.strip()]
    for at, row in rows:
        if "id" not in row or "ground_truth" not in row:
            raise DataError(f"{at}: must have 'id' and 'ground_truth'")
    return {str(row["id"]): row["ground_truth"] for _, row in rows}


def choice(row: Row, where: str, path: str) -> Row:
    """A question with options: a list `choices` or `options` (MMLU, MMLU-Pro), labels and texts
    (ARC), or the columns A, B, C, ... (MMMLU). The answer is a letter, an option's label, its
    number from 0 or its text; it becomes a letter. The language is that of the column, or of the
    file's name: mmlu_DE-DE.jsonl.
    """
    lower = {name.lower(): value for name, value in row.items()}
    names, texts = _options(row, where)
    letters = ascii_uppercase[: len(texts)]
    if not 2 <= len(texts) <= len(ascii_uppercase):
        raise DataError(f"{where}: has {len(texts)} options; there must be from 2 to 26")
    given = lower.get("answer", lower.get("answerkey"))
    answer = _letter(given, names, texts, where)
    options = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, texts))
    question = lower["question"]
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: the question must be a text that is not empty")
    prompt = _CHOOSE.format(letters=letters, question=question.strip(), options=options)
    labels = {"domain": lower.get("subject") or lower.get("category")}
    if region := _REGION.search(Path(path).name.split(".", 1)[0]):
        labels["language"] = region[1]
    return _made(row, labels, prompt=prompt, answer=answer, options=texts, choices=letters)


def _options(row: Row, where: str) -> tuple[list[str], list[str]]:
    """What the options are called, and their texts."""
    given = row.get("choices", row.get("options"))
    if isinstance(given, Mapping) and {"text", "label"} <= set(given):
        if len(given["text"]) != len(given["label"]):
            raise DataError(f"{where}: {len(given['text'])} options, {len(given['label'])} labels")
        return list(map(str, given["label"])), list(map(str, given["text"]))
    if isinstance(given, Mapping):
        return list(map(str, given)), [str(given[name]) for name in given]
    if given is None:
        names = [x for x in ascii_uppercase if row.get(x) is not None]
        return names, [str(row[name]) for name in names]
    if not isinstance(given, list) or not all(isinstance(x, str | int | float) for x in given):
        raise DataError(f"{where}: the options must be a list of texts, not {given!r:.80}")
    return list(ascii_uppercase[: len(given)]), list(map(str, given))


def _letter(answer: Any, names: list[str], texts: list[str], where: str) -> str:
    """The letter of the option that an answer names."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return ascii_uppercase[answer]
    text = str(answer).strip()
    for known in ([name.upper() for name in names], texts):
        wanted = text.upper() if known is not texts else text
        if known.count(wanted) == 1:
            return ascii_uppercase[known.index(wanted)]
    raise DataError(
        f"{where}: the answer {answer!r:.80} is none of the {len(texts)} options: write its letter"
        f" ({', '.join(names)[:60]}), its number from 0, or its text"
    )


def _made(row: Row, labels: Mapping[str, Any], **made: Any) -> Row:
    """The row with what was made of it, and those labels that it does not have and that can be
    some.
    """
    given = {
        name: value
        for name, value in labels.items()
        if not row.get(name) and isinstance(value, str | int) and len(str(value)) <= MOST_LABEL
    }
    return {**row, **given, **made}


def _text(row: Row, name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}, field {name!r}: must be a text, not {value!r:.80}")
    return value


def _texts(row: Row, name: str, where: str) -> list[str]:
    value = row.get(name)
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise DataError(f"{where}, field {name!r}: must be a list of texts, not {value!r:.80}")
    return value
