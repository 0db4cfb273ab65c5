"""Whose rows a file holds, told from its columns: one line of FORMATS for each kind of rows that
people have.

What a setting names comes first: a column named there is read, whatever the table says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from compass_jax.config.ranges import AUTO
from compass_jax.data import benchmarks
from compass_jax.data.benchmarks import Make
from compass_jax.data.files import DataError, check_tools, columns_of
from compass_jax.untrusted import parse_json
from compass_jax.verifiers.values import without_nulls

TURNS = "(its turns)"  # in the place of a column: the assistant's turns of the prompt's column


class Format(NamedTuple):
    """Where rows of one kind have what RL and SFT read; None: they have nothing for it."""

    name: str
    prompt: str  # text or chat messages; with TURNS a whole conversation
    answer: str | None  # RL's reference; empty: there is none, a verifier of one's own judges
    response: str | None  # what SFT learns
    also: tuple[str, ...] = ()  # columns that rows of this kind have beside these
    make: Make | None = None  # what makes such a row one of a prompt and an answer
    verifier: str = ""  # the one that judges it, where "math" cannot


_HUMAN_EVAL = ("task_id", "canonical_solution", "test", "entry_point")
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
# ShareGPT's `from` as a role; a tool's result is an observation there
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "observation": "tool",
    "tool": "tool",
}


class Reading(NamedTuple):
    """How one file's rows are read."""

    name: str  # of their format, where there is something to say of it
    prompt: str
    target: str  # the column of the reference (RL) or of what is learnt (SFT); TURNS; empty: none
    needs: tuple[str, ...] = ()  # of a row that is made: the columns of the file
    make: Make | None = None

    def said(self, path: str) -> str:
        """The line that tells a person what was recognised: "a.parquet: verl rows: prompt, ..."."""
        return f"{Path(path).name}: {self.name} rows: {', '.join(self.fields)}"

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns that every row must have."""
        target = [self.target] if self.target not in ("", TURNS) else []
        return self.needs or (self.prompt, *target)


def open_format(
    path: str,
    use: Literal["answer", "response"],
    named: tuple[str, str],
    settings: tuple[str, str],
    tell: Callable[[str], None],
    compared: bool = False,
) -> tuple[Reading, dict[str, str]]:
    """Returns `reading_of`, and the columns that `read_rows` requires, each with a remedy. `tell`
    gets a line on a format that was recognised.
    """
    reading = reading_of(path, use, named, settings, compared)
    if reading.name:
        tell(reading.said(path))
    remedies = [f"add it or set {setting}" for setting in settings]
    remedies += ["add it"] * len(reading.needs)
    return reading, dict(zip(reading.fields, remedies))


def reading_of(
    path: str,
    use: Literal["answer", "response"],
    named: tuple[str, str],
    settings: tuple[str, str],
    compared: bool = False,
) -> Reading:
    """How to read the rows of a file, by the first row of FORMATS that fits its columns.

    Args:
        path: a file of rows.
        use: which column of FORMATS is wanted beside the prompt.
        named: the columns that the settings name, AUTO where they leave it to the table.
        settings: the names of these two settings, for messages.
        compared: rows without a reference do not fit.

    Raises DataError, with the columns that are there, where nothing fits.
    """
    prompt, target = named
    if AUTO not in named:
        return Reading("", prompt, target)
    where, columns = columns_of(path)
    key = settings[0].rpartition(".")[0]
    benchmark = named == (AUTO, AUTO) and use == "answer"
    if benchmark and (made := _benchmark(where, columns, key, compared)):
        return made
    for name, setting in zip(named, settings):
        if name not in (AUTO, "", TURNS, *columns):
            fields = ", ".join(columns)[:200]
            raise DataError(
                f"{where}: no field {name!r} (fields: {fields}); add it or set {setting}"
            )
    for known, have in _usable(use, compared):
        have = have if target == AUTO else target
        ask = known.prompt if prompt == AUTO or have == TURNS else prompt
        if prompt not in (AUTO, ask) or ask not in columns:
            continue
        if have in ("", TURNS, *columns):
            guessed = named == (AUTO, AUTO) and known.name != "plain"
            return Reading(known.name if guessed else "", ask, have)
    raise DataError(
        f"{where}: these columns are of no known kind: {', '.join(columns)[:200]}; name them in"
        f" {settings[0]} and {settings[1]}, or write one of: {_known(use, compared)}"
    )


def _benchmark(where: str, columns: list[str], key: str, compared: bool) -> Reading | None:
    """How rows of a published evaluation set are read; None for others, and for those whose columns
    are read as they are.
    """
    for known in FORMATS:
        needs = tuple(filter(None, (known.prompt, known.answer, *known.also)))
        if not (known.make or known.verifier) or not set(needs) <= set(columns):
            continue
        if compared and known.verifier:
            raise DataError(
                f"{where}: these are rows of {known.name}, which verifier = 'math' cannot judge;"
                f" set {key}.verifier to {known.verifier!r}, or name the columns in {key}'s"
                " prompt_field and answer_field to have them read as they are"
            )
        if known.make is None:
            return Reading(known.name, known.prompt, "", needs)
        return Reading(known.name, "prompt", "answer", needs, known.make)
    return None


def _usable(use: str, compared: bool) -> Iterator[tuple[Format, str]]:
    """Yields the formats that have a column for a use, with its name."""
    for known in FORMATS:
        have = getattr(known, use)
        if have is not None and (have or not compared) and not known.verifier:
            yield known, have


def _known(use: str, compared: bool) -> str:
    return ", ".join(
        f"{known.prompt}{'' if have in ('', TURNS) else f' + {have}'} ({known.name})"
        for known, have in _usable(use, compared)
    )


def turns_of(value: Any, row: Mapping[str, Any], where: str) -> Any:
    """A column's chat messages with ShareGPT's turns (from, value) made messages (role, content);
    the row's `system`, which ShareGPT has beside them, comes first. Anything else as it is.
    """
    if not isinstance(value, list) or not any(isinstance(x, dict) and "from" in x for x in value):
        return value
    messages = [_message(turn, f"{where}[{i}]") for i, turn in enumerate(value)]
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or "value" not in turn or "from" not in turn:
        raise DataError(f"{where} must be an object with 'from' and 'value', not {turn!r:.80}")
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise DataError(
            f"{where} is from {speaker!r:.80}; known: {', '.join(SPEAKERS)}; write calls of tools"
            " as messages with tool_calls"
        )
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {**others, "role": SPEAKERS[speaker], "content": turn["value"]}


def tools_of(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """A row's tools, which may be written as a list of objects or as its JSON text."""
    where, tools = f"{where}, field 'tools'", row.get("tools")
    if isinstance(tools, str) and tools.strip():
        return check_tools(parse_json(tools, where, error=DataError), where)
    return without_nulls(check_tools(tools, where))


def reference(value: Any) -> Any:
    """Returns a ground truth: of a chat its last turn's text, of a worked solution whose last line
    is `#### 72`, as GSM8K's are, the 72. The objects in it have no null fields.
    """
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        turn = value[-1]
        value = turn["content"] if turn.get("role") == "assistant" and "content" in turn else value
    if not isinstance(value, str) or "####" not in value:
        return without_nulls(value)
    before, _, last = value.rpartition("####")
    last = last.strip()
    return last if last and "\n" not in last and before[-1:] in ("", "\n") else value
