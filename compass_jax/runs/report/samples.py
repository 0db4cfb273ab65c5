"""The logged groups of a run with the numbers of their tokens, as many as fit into a page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.runs.report.embed import size_of
from compass_jax.runs.report.metrics import ReportError, number, parse_line, parse_lines

MOST_TEXT = 20_000  # maximum characters of a prompt or a response on a page
TAIL = 4_000  # characters of these from the end
TEXT_SHARE = 0.85  # share of the room for texts, if tokens have numbers
COLUMNS = ("entropy", "logp", "logp_diff", "advantage", "ratio", "clipped", "version")
_HEAD = re.compile(rb'\{"stage": "([^"\\]*)", "step": (\d+)(?:, "group": (\d+))?')


def index(path: Path) -> list[tuple[int, int, tuple[str, int, int]]]:
    """Returns (offset, line number, (stage, step, group)) of each line of a log of samples. Groups
    of rollouts.jsonl are counted within their step. An incomplete last line is left out.

    The count continues in a step that is logged again (`--lost-log`). Raises ReportError, with the
    number, for a line without stage and step.
    """
    places: list[tuple[int, int, tuple[str, int, int]]] = []
    counts: dict[tuple[str, int], int] = {}
    offset = 0
    for line_number, line in enumerate(_lines(path), 1):
        if not line.endswith(b"\n"):
            break
        stage, step, group = _head(line, path, line_number)
        count = counts.get((stage, step), 0)
        counts[stage, step] = count + 1
        places.append((offset, line_number, (stage, step, count if group is None else group)))
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
    lines = [x for x in index(path) if x[2][0] == stage]
    chosen: dict[int, JsonObject] = {}
    tokens = folder / "tokens.jsonl"
    reserve = room - int(TEXT_SHARE * room) if tokens.is_file() else 0
    room -= reserve
    with open(path, "rb") as file:
        for i in evenly(len(lines)):
            offset, line_number, (_, step, group) = lines[i]
            file.seek(offset)
            row = parse_line(file.readline(), group_of_row, path, line_number)
            row |= {"step": step, "group": group}
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
    where = {key[1:]: (offset, line) for offset, line, key in index(path) if key[0] == stage}
    with open(path, "rb") as file:
        for i in evenly(len(groups)):
            key = groups[i]["step"], groups[i]["group"]
            if key not in where:
                continue
            offset, line_number = where[key]
            file.seek(offset)
            means, values = parse_line(file.readline(), _tokens, path, line_number)
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
    """Returns the parts of a line of rollouts.jsonl, of any version, that are shown. A text of more
    than `most` characters is {"head", "left_out" (number of characters), "tail"}.
    """

    def display(x: Json) -> str | JsonObject:
        text = x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)
        if most is None or len(text) <= most:
            return text
        return {"head": text[: most - TAIL], "left_out": len(text) - most, "tail": text[-TAIL:]}

    return {
        "prompt": display(row["prompt"]),
        "label": str(row.get("label", "")),
        "answer": display(row.get("answer", "")),
        "visit": number(row.get("visit")),
        "samples": [
            {
                "response": display(x["response"]),
                "reward": number(x.get("reward")),
                "outcome": str(x.get("outcome", "ok")),
                "tokens": number(x.get("tokens")),
                "truncated": bool(x.get("truncated", False)),
                "components": {str(k): number(v) for k, v in x.get("components", {}).items()},
                **({"error": str(x["error"])} if x.get("error") else {}),
            }
            for x in row["samples"]
        ],
    }


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
