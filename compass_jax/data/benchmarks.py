"""Converters for rows of published evaluation sets.

Each takes a row and the path of its file. It returns the row with "prompt" and, where applicable,
"answer" and labels (rewards/tasks/rows.py). It raises ValueError or another error of Python for a
row that does not match the set's documentation; `convert` adds the row's place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.data.files import DataError, read_rows
from compass_jax.data.messages import MOST_LABEL
from compass_jax.rewards.verifiers.extract import boxed

Row = JsonObject
Make = Callable[[Row, str], Row]

_REGION = re.compile(r"(?:^|[^A-Za-z])([A-Za-z]{2}[-_][A-Za-z]{2})$")  # mmlu_DE-DE
_CHOOSE = (
    "Answer the following multiple-choice question. End with one line 'Answer: LETTER', where"
    " LETTER is one of {letters}.\n\n{question}\n\n{options}"
)
_TESTS = "{text}\nThe code must pass these tests:\n\n```python\n{tests}\n```"

_HEADS = "{text}\n\nThe tests use these functions:\n\n```python\n{heads}\n```"
_COMPLETE = (
    "Complete this Python function, and answer with all of it in a code block.\n\n```python\n"
)
# BFCL's type names -> JSON schema's; "any" sets no type
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def convert(make: Make, row: Row, where: str, path: str) -> Row:
    """Returns a converted row. Raises DataError for one that is not as its set documents it."""
    try:
        return make(row, path)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{where}: not as its set documents it: {error}") from error


def mathematics(row: Row, path: str) -> Row:
    r"""Converts a problem of MATH (arXiv 2103.03874).

    The reference is `answer`, or else the last \boxed{...} of `solution`. `type` or `subject` is
    the domain, and `level` is the difficulty.
    """
    answer = row.get("answer")
    if answer is None and (answer := boxed(row["solution"])) is None:
        raise ValueError(
            r"the field 'solution' holds no \boxed{...}, so that there is no reference; add the"
            " column 'answer'"
        )
    labels = {"domain": row.get("type") or row.get("subject"), "difficulty": row.get("level")}
    return _with_columns(row, labels, prompt=row["problem"], answer=answer)


def human_eval(row: Row, path: str) -> Row:
    """Converts a problem of HumanEval (arXiv 2107.03374) to the form of data/human_eval.py."""
    return _with_columns(row, {}, **program_row(row))


def program_row(one: JsonMapping) -> JsonObject:
    """Returns the row of a problem that has HumanEval's columns."""
    return {
        "id": one["task_id"],
        "prompt": f"{_COMPLETE}{one['prompt']}```",
        "setup": one["prompt"],
        "test": one["test"],
        "entry_point": one["entry_point"],
        **_solved(one["canonical_solution"]),
    }


def leet_code(row: Row, path: str) -> Row:
    """Converts a problem of LeetCodeDataset (arXiv 2504.14655). `prompt` has the imports and the
    classes that tests and programs share.
    """
    columns = {"setup": row["prompt"], **_solved(row["completion"])}
    labels = {"difficulty": row.get("difficulty")}
    return _with_columns(row, labels, id=row["task_id"], **columns, prompt=row["query"])


def big_code_bench(row: Row, path: str) -> Row:
    """Converts a task of BigCodeBench (arXiv 2406.15877), in its form with instructions."""
    columns = {"setup": row["code_prompt"], **_solved(row["canonical_solution"])}
    return _with_columns(row, {}, id=row["task_id"], **columns, prompt=row["instruct_prompt"])


def kod_code(row: Row, path: str) -> Row:
    """Converts a question of KodCode (arXiv 2503.02951). The prompt shows the heads of the
    functions, because only the tests name them otherwise.
    """
    heads = [one["function_declaration"] for one in row["test_info"] or ()]
    prompt = row["question"]
    if heads:
        prompt = _HEADS.format(text=prompt, heads="\n".join(heads))
    labels = {"domain": row.get("subset"), "difficulty": row.get("gpt_difficulty")}
    test = row["test"] if "test" in row else row["test_code"]
    return _with_columns(row, labels, prompt=prompt, test=test, **_solved(row["solution"]))


def _solved(solution: Json) -> JsonObject:
    """Returns the columns of a row's own program: `solution` is tried before a run."""
    return {"answer": solution, "solution": solution}


def mbpp(row: Row, path: str) -> Row:
    """Converts a problem of MBPP (arXiv 2108.07732), the full set (`text`) or the sanitised one
    (`prompt`).

    The prompt shows the tests, because only they name the function.
    """
    tests = row["test_list"]
    if not isinstance(tests, list) or not tests:
        raise ValueError("the field 'test_list' must be a list of texts that is not empty")
    setup = "\n".join([*(row.get("test_imports") or []), row.get("test_setup_code") or ""]).strip()
    prompt = _TESTS.format(text=row.get("text", row.get("prompt")), tests="\n".join(tests))
    return _with_columns(row, {}, prompt=prompt, tests=tests, setup=setup, **_solved(row["code"]))


def bfcl(row: Row, path: str) -> Row:
    """Converts a single-turn request of BFCL to the form of data/bfcl.py.

    The possible answers are the row's `ground_truth`. If it is missing, they come from the file of
    the same name in the sibling folder possible_answer, where the published set has them. A file
    with "irrelevance" in its name has no possible answers.
    """
    turns, functions = row["question"], row["function"]
    if len(turns) != 1:
        raise ValueError(
            f"it has {len(turns)} turns, and a row is one request; take the task"
            " compass_jax.data.bfcl:multi_turn_base for such conversations"
        )
    name, answer = str(row["id"]), row.get("ground_truth")
    if answer is None and "irrelevance" not in Path(path).name:
        answer = _possible(path)[name]
    tools = [tool_of(one) for one in (functions if isinstance(functions, list) else [functions])]
    labels = {"domain": name.rpartition("_")[0] or name}
    return _with_columns(row, labels, prompt=turns[0], tools=tools, answer=answer or [])


def _schema(value: Json) -> Json:
    """Converts a BFCL type description to JSON schema."""
    if isinstance(value, list):
        return [_schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    schema = {key: _schema(one) for key, one in value.items()}
    if kind == "any":
        del schema["type"]
    elif isinstance(kind, str):
        schema["type"] = _TYPES.get(kind, kind)
    return schema


def tool_of(described: JsonMapping) -> JsonObject:
    """Returns a tool in the form of chat templates."""
    function = {key: described[key] for key in ("name", "description")}
    return {
        "type": "function",
        "function": {**function, "parameters": _schema(described["parameters"])},
    }


@lru_cache(maxsize=4)
def _possible(path: str) -> JsonObject:
    file = Path(path).parent / "possible_answer" / Path(path).name
    if not file.is_file():
        raise ValueError(
            f"no field 'ground_truth', and there is no {file}; BFCL's possible answers are in a"
            " folder of this name"
        )
    rows = read_rows(str(file), dict.fromkeys(("id", "ground_truth"), "add it"))
    return {str(row["id"]): row["ground_truth"] for _, row in rows}


def choice(row: Row, path: str) -> Row:
    """Converts a multiple-choice question.

    The options are a list `choices` or `options` (MMLU, MMLU-Pro), labels and texts (ARC), or the
    columns A, B, C, ... (MMMLU). The answer may be a letter, an option's label, its index from 0 or
    its text; it becomes a letter. The language comes from its column or from the file's name:
    mmlu_DE-DE.jsonl.
    """
    lower = {name.lower(): value for name, value in row.items()}
    names, texts = _options(row)
    letters = ascii_uppercase[: len(texts)]
    if not 2 <= len(texts) <= len(ascii_uppercase):
        raise ValueError(f"it has {len(texts)} options; there must be from 2 to 26")
    answer = _letter(lower.get("answer", lower.get("answerkey")), names, texts)
    options = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, texts))
    question = lower["question"].strip()
    if not question:
        raise ValueError("the question is empty")
    prompt = _CHOOSE.format(letters=letters, question=question, options=options)
    labels = {"domain": lower.get("subject") or lower.get("category")}
    if region := _REGION.search(Path(path).name.split(".", 1)[0]):
        labels["language"] = region[1]
    return _with_columns(row, labels, prompt=prompt, answer=answer, options=texts, choices=letters)


def _options(row: Row) -> tuple[list[str], list[str]]:
    """Returns the names and the texts of the options."""
    options = row.get("choices", row.get("options"))
    if options is None:
        options = {x: row[x] for x in ascii_uppercase if row.get(x) is not None}
    if isinstance(options, Mapping) and {"text", "label"} <= set(options):
        options = dict(zip(options["label"], options["text"], strict=True))
    if isinstance(options, list):
        options = dict(zip(ascii_uppercase, options))
    if not isinstance(options, Mapping):
        raise ValueError(f"the options must be a list of texts, not {options!r:.80}")
    return list(map(str, options)), list(map(str, options.values()))


def _letter(answer: Json, names: list[str], texts: list[str]) -> str:
    """Returns the letter of the option that an answer names."""
    if type(answer) is int and 0 <= answer < len(texts):
        return ascii_uppercase[answer]
    text = str(answer).strip()
    for target, candidates in ((text.upper(), [x.upper() for x in names]), (text, texts)):
        if candidates.count(target) == 1:
            return ascii_uppercase[candidates.index(target)]
    raise ValueError(
        f"the answer {answer!r:.80} is none of the {len(texts)} options: write its letter"
        f" ({', '.join(names)[:60]}), its number from 0, or its text"
    )


def _with_columns(row: Row, labels: JsonMapping, **columns: Any) -> Row:
    """Returns the row with the converted columns, and with valid labels that it lacks."""
    new_labels = {
        name: value
        for name, value in labels.items()
        if not row.get(name) and isinstance(value, str | int) and len(str(value)) <= MOST_LABEL
    }
    return {**row, **new_labels, **columns}
