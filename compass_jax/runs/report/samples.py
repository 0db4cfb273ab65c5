"""The logged groups of a run with the numbers of their tokens, as many as fit into a page."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.runs.logfile import log_parts
from compass_jax.runs.report.embed import size_of
from compass_jax.runs.report.metrics import ReportError, Row, number, parse_line, parse_lines

MOST_TEXT = 20_000  # maximum characters of a prompt or a response on a page
TAIL = 4_000  # characters of these from the end
TEXT_SHARE = 0.85  # share of the room for texts, if tokens have numbers
LEAST_TEXT = 800  # characters of each part of a response that may be shown at least
MOST_ERROR, MOST_ERRORS = 300, 8  # characters of a tool's error, and errors of a part
_TOOL_ERROR = re.compile(r'\{\s*"error"\s*:')
COLUMNS = ("entropy", "logp", "logp_diff", "advantage", "ratio", "clipped", "version")
_HEAD = re.compile(rb'\{"stage": "([^"\\]*)", "step": (\d+)(?:, "group": (\d+))?')


class Place(NamedTuple):
    """Where a line of a log is."""

    part: Path
    offset: int
    line_number: int

    def read(self, parse: Callable[[Json], Row]) -> Row:
        """Returns `parse` of the line's JSON."""
        with open(self.part, "rb") as file:
            file.seek(self.offset)
            return parse_line(file.readline(), parse, self.part, self.line_number)


def index(path: Path) -> list[tuple[Place, tuple[str, int, int]]]:
    """Returns (place, (stage, step, group)) of each line of a log of samples. Groups of
    rollouts.jsonl are counted within their step. An incomplete last line is left out.

    The count continues in a step that is logged again (`--lost-log`). Raises ReportError, with the
    number, for a line without stage and step.
    """
    places: list[tuple[Place, tuple[str, int, int]]] = []
    counts: dict[tuple[str, int], int] = {}
    for part in log_parts(path) or [path]:
        offset = 0
        for i, line in enumerate(_lines(part), 1):
            if not line.endswith(b"\n"):
                break
            stage, step, group = _head(line, part, i)
            count = counts.get((stage, step), 0)
            counts[stage, step] = count + 1
            key = stage, step, count if group is None else group
            places.append((Place(part, offset, i), key))
            offset += len(line)
    return places


def _head(line: bytes, path: Path, line_number: int) -> tuple[str, int, int | None]:
    """Returns (stage, step, group) of a line, from its start if that has the usual form."""
    if head := _HEAD.match(line):
        group = None if head[3] is None else int(head[3])
        return head[1].decode(errors="replace"), int(head[2]), group
    row = parse_line(line, lambda x: (str(x.get("stage", "rl")), int(x["step"])), path, line_number)
    return (*row, None)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from file
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from error


def evenly(count: int) -> Iterator[int]:
    """Yields every number below `count` once: the last, the first, the middle, the quarters and so
    on, so that every prefix is evenly spaced.
    """
    seen: set[int] = set()
    parts = 1
    while len(seen) < count:
        for part in range(parts, -1, -1):
            if (i := part * (count - 1) // parts) not in seen:
                seen.add(i)
                yield i
        parts *= 2


def read_samples(folder: Path, stage: str, room: int) -> tuple[list[JsonObject], int]:
    """Returns (the groups of a stage that fit into `room` bytes of JSON, by step; the number of
    logged groups). If not all fit, the groups are evenly over the run. Numbers of tokens get the
    rest of the room, at least 15%.
    """
    path = folder / "rollouts.jsonl"
    if not path.is_file():
        return [], 0
    lines = [x for x in index(path) if x[1][0] == stage]
    chosen: dict[int, JsonObject] = {}
    tokens = folder / "tokens.jsonl"
    reserve = room - int(TEXT_SHARE * room) if tokens.is_file() else 0
    room -= reserve
    for i in evenly(len(lines)):
        place, (_, step, group) = lines[i]
        row = place.read(group_of_row) | {"step": step, "group": group}
        if (size := size_of(row)) > room:
            break
        chosen[i], room = row, room - size
    groups = [chosen[i] for i in sorted(chosen)]
    _add_tokens(tokens, stage, groups, room + reserve)
    return groups, len(lines)


def _add_tokens(path: Path, stage: str, groups: list[JsonObject], room: int) -> None:
    """Adds the numbers of tokens to the samples, under `values`, and their means."""
    if not path.is_file():
        return
    where = {key[1:]: place for place, key in index(path) if key[0] == stage}
    for i in evenly(len(groups)):
        key = groups[i]["step"], groups[i]["group"]
        if key not in where:
            continue
        means, values = where[key].read(_tokens)
        added: list[JsonObject] = [{} for _ in groups[i]["samples"]]
        for name, numbers in means.items():
            for to, x in zip(added, numbers):
                to.setdefault("means", {})[name] = x
        for at, columns in values.items():
            if at < len(added):
                added[at]["values"] = columns
        if (size := size_of(added)) > room:
            return
        room -= size
        for sample, more in zip(groups[i]["samples"], added, strict=True):
            sample |= more


def read_groups(run: str | os.PathLike) -> Iterator[JsonObject]:
    """Yields the logged groups of a run, or of the folder of `compass eval --out`.

    Skips an incomplete last line. Raises ReportError for a folder without groups, and for a damaged
    line, with its number.
    """
    files = [Path(run) / name for name in ("rollouts.jsonl", "answers.jsonl")]
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        raise ReportError(
            f"{files[0]} does not exist: {run} is not the directory of an RL run that has done a"
            " step, nor of an evaluation"
        )
    yield from parse_lines(path, _whole_group)


def _whole_group(row: JsonMapping) -> JsonObject:
    """Returns a line's group; a sample whose reward is not a finite number has no verdict."""
    group = group_of_row(row, most=None)
    for sample in group["samples"]:
        if sample["outcome"] == "ok" and sample["reward"] is None:
            sample["outcome"] = "no number"
    return {**group, "step": int(row["step"])}


def group_of_row(row: JsonMapping, most: int | None = MOST_TEXT) -> JsonObject:
    """Returns the parts of a line of rollouts.jsonl, of any version, that are shown; texts are
    those of `_display`. With `most`, a response of several parts has a text for each of them.
    """
    display = partial(_display, most=most)
    return {
        "prompt": display(row["prompt"]),
        "label": str(row.get("label", "")),
        "answer": display(row.get("answer", "")),
        "visit": number(row.get("visit")),
        "samples": [
            {
                **({"response": display(x["response"])} if most is None else _response(x, most)),
                "reward": number(x.get("reward")),
                "outcome": str(x.get("outcome", "ok")),
                "tokens": number(x.get("tokens")),
                "truncated": bool(x.get("truncated", False)),
                "components": {str(k): number(v) for k, v in x.get("components", {}).items()},
                **({"error": str(x["error"])} if x.get("error") else {}),
                **({"episode": _record(x["episode"])} if x.get("episode") else {}),
            }
            for x in row["samples"]
        ],
    }


def _display(value: Json, most: int | None) -> str | JsonObject:
    """Returns a text; one of more than `most` characters is {"head", "left_out" (number of
    characters), "tail"}.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if most is None or len(text) <= most:
        return text
    tail = min(TAIL, most // 2)
    return {"head": text[: most - tail], "left_out": len(text) - most, "tail": text[-tail:]}


def _response(sample: JsonMapping, most: int) -> dict[str, object]:
    """Returns a sample's response, or the parts of one that the model did not say alone: each with
    its text, tokens and seconds, and the errors that tools answered with.
    """
    if not sample.get("parts"):
        return {"response": _display(sample["response"], most)}
    parts, start = list[dict[str, object]](), 0
    for part in sample["parts"]:
        text = sample["response"][start : start + int(part["chars"])]
        start += len(text)
        room, is_given = max(most // len(sample["parts"]), LEAST_TEXT), part["by"] != "model"
        parts.append({"given": is_given, "text": _display(text, room)})
        parts[-1]["tokens"] = number(part["tokens"])
        if "time_s" in part:
            parts[-1]["time_s"] = number(part["time_s"])
        if is_given and (errors := tool_errors(text)):
            parts[-1]["errors"] = errors
    return {"parts": parts}


def tool_errors(text: str) -> list[str]:
    """Returns the errors in what an environment said: each JSON object with "error", which is what
    compass_jax.rewards.tasks.tools answers a call with that failed.
    """
    errors, decoder = list[str](), json.JSONDecoder()
    for match in _TOOL_ERROR.finditer(text):
        with contextlib.suppress(ValueError, RecursionError):
            reason = decoder.raw_decode(text, match.start())[0]["error"]
            errors.append(str(reason)[:MOST_ERROR])
    return errors[:MOST_ERRORS]


def _record(record: JsonMapping) -> dict[str, object]:
    """Returns how an episode went: numbers by name, and its end."""
    numbers = {str(name): number(x) for name, x in record.items() if name != "end"}
    return numbers | ({"end": str(record["end"])} if "end" in record else {})


def _tokens(row: JsonMapping) -> tuple[dict[str, list], dict[int, JsonObject]]:
    """Returns (name -> mean of each sample, sample -> its tokens' numbers) of a line of
    tokens.jsonl.
    """
    means = {str(name): [number(x) for x in part] for name, part in row["means"].items()}
    samples = {}
    for sample in row["samples"]:
        columns = {name: sample[name] for name in COLUMNS if name in sample}
        samples[int(sample["sample"])] = {"text": sample["text"]} | {
            name: [number(x) for x in column] if isinstance(column, list) else number(column)
            for name, column in columns.items()
        }
    return means, samples
