"""Detection of a file's row format from its columns: FORMATS has one entry per known format.

Columns that a setting names take precedence over the table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.config.ranges import AUTO
from compass_jax.data import benchmarks
from compass_jax.data.benchmarks import Make
from compass_jax.data.files import DataError, columns_of
from compass_jax.data.message_text import messages_in
from compass_jax.data.messages import ROLES, check_tools
from compass_jax.rewards.verifiers.values import without_nulls

TURNS = "(its turns)"  # instead of a column name: the assistant's turns in the prompt's column


class Format(NamedTuple):
    """A row format: the columns that RL and SFT read; None if the format has no such column."""

    name: str
    prompt: str  # text or chat messages; with TURNS a whole conversation
    answer: str | None  # RL's reference; empty: no reference, a custom verifier judges
    response: str | None  # SFT's target
    also: tuple[str, ...] = ()  # further columns that identify the format
    make: Make | None = None  # converts such a row to prompt and answer
    verifier: str = ""  # the verifier to use if "math" cannot judge it


_HUMAN_EVAL = ("task_id", "canonical_solution", "test", "entry_point")
_LEET_CODE = ("task_id", "prompt", "completion", "test", "entry_point")
_KOD_CODE = ("solution", "test_info")
_BIG = (*_HUMAN_EVAL, "code_prompt")
FORMATS = (
    *(
        Format("multiple choice", question, answer, None, also, benchmarks.choice, "choice")
        for question, answer in (
            ("question", "answer"),
            ("question", "answerKey"),
            ("Question", "Answer"),
        )
        for also in (("choices",), ("options",), ("A", "B"))
    ),
    Format("HumanEval", "prompt", "", None, _HUMAN_EVAL, benchmarks.human_eval, "code"),
    Format("MBPP", "text", "", None, ("code", "test_list"), benchmarks.mbpp, "code"),
    Format("MBPP", "prompt", "", None, ("code", "test_list"), benchmarks.mbpp, "code"),
    Format("LeetCode", "query", "", None, _LEET_CODE, benchmarks.leet_code, "code"),
    Format("BigCodeBench", "instruct_prompt", "", None, _BIG, benchmarks.big_code_bench, "code"),
    *(
        Format("KodCode", "question", "", None, (x, *_KOD_CODE), benchmarks.kod_code, "code")
        for x in ("test", "test_code")
    ),
    Format("IFEval", "prompt", "", None, ("instruction_id_list", "kwargs"), None, "instructions"),
    Format("BFCL", "question", "", None, ("id", "function"), benchmarks.bfcl, "tools"),
    Format("plain", "prompt", "answer", None),
    Format("verl", "prompt", "reward_model.ground_truth", "extra_info.answer"),
    Format("OpenAI", "messages", "answer", None),
    Format("OpenAI", "messages", TURNS, TURNS),
    Format("ShareGPT", "conversations", "answer", None),
    Format("ShareGPT", "conversations", TURNS, TURNS),
    Format("TRL", "prompt", "completion", "completion"),
    Format("TRL", "prompt", "solution", None),
    Format("TRL", "prompt", "ground_truth", None),
    Format("GSM8K", "question", "answer", "answer"),
    Format("MATH", "problem", "answer", "solution", (), benchmarks.mathematics),
    Format("MATH", "problem", "solution", "solution", (), benchmarks.mathematics),
    Format("AIME", "Problem", "Answer", "Solution"),
    Format("prompt-only", "prompt", "", None),
)
# ShareGPT's `from` -> role; it calls a tool's result an observation
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
SPEAKERS |= {role: role for role in ROLES}


class Reading(NamedTuple):
    """The columns to read from one file."""

    name: str  # of the format; empty if it is not reported
    prompt: str
    target: str  # the column of the reference (RL) or the target (SFT), or TURNS; may be empty
    needs: tuple[str, ...] = ()  # for a row that is converted: the columns of the file
    make: Make | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns that every row must have."""
        return self.needs or tuple(x for x in (self.prompt, self.target) if x not in ("", TURNS))


def open_format(
    path: str,
    use: Literal["answer", "response"],
    named: tuple[str, str],
    settings: tuple[str, str],
    tell: Callable[[str], None],
    compared: bool = False,
) -> tuple[Reading, dict[str, str]]:
    """Returns the columns to read from a file, from the first entry of FORMATS that matches, and
    the columns that `read_rows` requires, each with a remedy.

    Args:
        path: a file of rows.
        use: the column of FORMATS to read in addition to the prompt.
        named: the columns that the settings name; AUTO for detection.
        settings: the names of these two settings, for messages.
        tell: receives a line if a format was detected.
        compared: rejects formats without a reference.

    Raises DataError, which lists the file's columns, if no format matches.
    """
    reading = Reading("", *named)
    if AUTO in named:
        reading = _detected(*columns_of(path), use, named, settings, compared)
    if reading.name:
        tell(f"{Path(path).name}: {reading.name} rows: {', '.join(reading.fields)}")
    remedies = [f"add it or set {setting}" for setting in settings]
    return reading, dict(zip(reading.fields, [*remedies, *["add it"] * len(reading.needs)]))


def _detected(
    where: str,
    columns: list[str],
    use: str,
    named: tuple[str, str],
    settings: tuple[str, str],
    compared: bool,
) -> Reading:
    (prompt, target), text = named, ", ".join(columns)[:200]
    if named == (AUTO, AUTO) and use == "answer":
        for known in FORMATS:
            if reading := _benchmark(known, where, columns, settings[0], compared):
                return reading
    for name, setting in zip(named, settings):
        if name not in (AUTO, "", TURNS, *columns):
            raise DataError(f"{where}: no field {name!r} (fields: {text}); add it or set {setting}")
    known_formats = []
    for known in FORMATS:
        have = getattr(known, use)
        if have is None or (compared and not have) or known.verifier:
            continue
        target_column = have if target == AUTO else target
        prompt_column = known.prompt if prompt == AUTO or target_column == TURNS else prompt
        usable = prompt in (AUTO, prompt_column) and prompt_column in columns
        if usable and target_column in ("", TURNS, *columns):
            is_detected = named == (AUTO, AUTO) and known.name != "plain"
            return Reading(known.name if is_detected else "", prompt_column, target_column)
        second = "" if have in ("", TURNS) else f" + {have}"
        known_formats.append(f"{known.prompt}{second} ({known.name})")
    raise DataError(
        f"{where}: these columns are of no known kind: {text}; name them in {settings[0]} and"
        f" {settings[1]}, or write one of: {', '.join(known_formats)}"
    )


def _benchmark(
    known: Format, where: str, columns: list[str], setting: str, compared: bool
) -> Reading | None:
    """Returns the Reading of a published evaluation set; None for other rows."""
    needs = tuple(filter(None, (known.prompt, known.answer, *known.also)))
    if not (known.make or known.verifier) or not set(needs) <= set(columns):
        return None
    if compared and known.verifier:
        key = setting.rpartition(".")[0]
        raise DataError(
            f"{where}: these are rows of {known.name}, which verifier = 'math' cannot judge;"
            f" set {key}.verifier to {known.verifier!r}, or name the columns in {key}'s"
            " prompt_field and answer_field to have them read as they are"
        )
    if known.make is None:
        return Reading(known.name, known.prompt, "", needs)
    return Reading(known.name, "prompt", "answer", needs, known.make)


def turns_of(value: Json, row: JsonMapping, where: str) -> Json:
    """Returns a column's chat messages, with ShareGPT's turns (from, value) converted to messages.
    They may be the JSON text of a list.

    The row's `system` field, which ShareGPT stores separately, becomes the first message. Other
    values are returned unchanged. Raises DataError for messages in another text (`messages_in`).
    """
    value = messages_in(value, where)
    if not isinstance(value, list) or not any(isinstance(x, dict) and "from" in x for x in value):
        return value
    messages = [_message(turn, f"{where}[{i}]") for i, turn in enumerate(value)]
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def _message(turn: Json, where: str) -> JsonObject:
    if not isinstance(turn, dict) or "value" not in turn or "from" not in turn:
        raise DataError(f"{where} must be an object with 'from' and 'value', not {turn!r:.80}")
    fields = {**turn}
    speaker, content = str(fields.pop("from")), fields.pop("value")
    if speaker not in SPEAKERS:
        raise DataError(
            f"{where} is from {speaker!r:.80}; known: {', '.join(SPEAKERS)}; write calls of tools"
            " as messages with tool_calls"
        )
    return {**fields, "role": SPEAKERS[speaker], "content": content}


def tools_of(row: JsonMapping, where: str) -> list[JsonObject]:
    """Returns a row's tools, given as a list of objects or as its JSON text."""
    where, tools = f"{where}, field 'tools'", row.get("tools")
    if isinstance(tools, str) and tools.strip():
        return check_tools(tools, where)
    return without_nulls(check_tools(tools, where))


def reference(value: Json, where: str = "the reference") -> Json:
    """Returns the reference answer in a ground-truth value; `where` is its place, for errors.

    For a chat, also as JSON text, it is the text of the last turn. For a solution that ends with a
    line `#### 72`, as in GSM8K, it is 72. Null fields of objects are removed.
    """
    value = messages_in(value, where)
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        turn = value[-1]
        value = turn["content"] if turn.get("role") == "assistant" and "content" in turn else value
    if not isinstance(value, str) or "####" not in value:
        return without_nulls(value)
    before, _, last = value.rpartition("####")
    last = last.strip()
    return last if last and "\n" not in last and before[-1:] in ("", "\n") else value
