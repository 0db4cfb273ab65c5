"""The precision and recall of `compass prepare-sft` on near-duplicates, and its cost on many rows.

    python -m benchmarks.near_duplicates [--rows 6000] [--lines 1000000] [--out FILE.json]

Rows are word problems with worked solutions of reasoning-gym's gsm_symbolic, about 100 templates
with other names, things and numbers each time: texts of one template are different questions. Of
those with the same numbers, which differ in names alone, the first is taken. A part of the rows
comes again after an edit: words replaced by others (one to three, never numbers), words left out,
sentences or steps in another order, white space, upper and lower case, punctuation gone. A row is a
near-duplicate where a row of its family came before.

    recall      of the rows that a family member precedes, the share that is taken out
    precision   of the rows that are taken out, the share that a family member precedes

Both for each kind of edit, at several thresholds; "without numbers" leaves the rule out that
questions with other numbers differ. The lines are short made-up questions and answers: a tenth of
them copies, a tenth edited copies, a fifth of one template. The command runs in a separate process,
whose peak of memory the kernel reports. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compass_jax.apps.curate import sample
from compass_jax.apps.curate.prepare import prepare
from compass_jax.config.prepare import PrepareConfig

OTHERS = ("quickly", "little", "often", "several", "rather", "simply", "another", "good", "new")
THRESHOLDS = (0.6, 0.7, 0.8)
EDITED = 0.4  # share of the rows that come again after an edit
VOCABULARY = 20_000
COMMAND = "python -m benchmarks.near_duplicates"
Edit = Callable[[random.Random, str], str]


def _changed(rng: random.Random, text: str, count: int, drop: bool) -> str:
    """Returns a text of which `count` words without a digit are replaced or left out."""
    parts = re.split(r"(\s+)", text)
    places = [i for i in range(0, len(parts), 2) if parts[i].isalpha()]
    for i in rng.sample(places, min(count, len(places))):
        parts[i] = "" if drop else rng.choice(OTHERS)
    return "".join(parts)


def _reordered(rng: random.Random, text: str) -> str:
    """Returns a text of which two neighbouring sentences, or lines, change places."""
    parts = re.split(r"(?<=[.?!])\s+|\n", text)
    if len(parts) < 2:
        return text
    i = rng.randrange(len(parts) - 1)
    parts[i : i + 2] = parts[i + 1], parts[i]
    return " ".join(parts)


def _spaced(rng: random.Random, text: str) -> str:
    return re.sub(r" ", lambda _: rng.choice((" ", " ", "  ", "\n", "\t")), text)


EDITS: dict[str, Edit] = {
    "one word": lambda rng, text: _changed(rng, text, 1, False),
    "two words": lambda rng, text: _changed(rng, text, 2, False),
    "three words": lambda rng, text: _changed(rng, text, 3, False),
    "a word left out": lambda rng, text: _changed(rng, text, 1, True),
    "sentences": _reordered,
    "white space": _spaced,
    "case": lambda rng, text: rng.choice((str.upper, str.lower, str.title))(text),
    "punctuation": lambda rng, text: re.sub(r"[?!]|[,.](?!\d)", "", text),
}


def corpus(rows: int, seed: int) -> list[dict[str, Any]]:
    """Returns rows in a random order, each with its family and its edit (empty: none)."""
    import reasoning_gym

    rng = random.Random(seed)
    drawn = reasoning_gym.create_dataset("gsm_symbolic", seed=seed, size=rows)
    corpus_rows, seen = [], set()
    for entry in drawn:
        question, values = entry["question"].strip(), entry["metadata"]["variables"]
        numbers = tuple((x, str(v)) for x, v in sorted(values.items()) if re.search(r"\d", str(v)))
        problem = numbers or question
        if problem in seen:
            continue
        seen.add(problem)
        family = len(seen)
        answer = entry["metadata"]["answer_cot"]
        corpus_rows.append(_row(question, answer, family, ""))
        if rng.random() < EDITED:
            name = rng.choice(list(EDITS))
            # the longer texts have the edit in one half or the other
            if rng.random() < 0.5:
                question = EDITS[name](rng, question)
            else:
                answer = EDITS[name](rng, answer)
            corpus_rows.append(_row(question, answer, family, name))
    rng.shuffle(corpus_rows)
    return corpus_rows


def _row(question: str, answer: str, family: int, edit: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "family": family, "edit": edit}


def found_in(rows: list[dict[str, Any]], folder: Path, similarity: float) -> dict[str, Any]:
    """Returns the precision and recall of one threshold, and the recall of each kind of edit."""
    file, out = folder / "rows.jsonl", folder / f"out_{similarity}_{time.monotonic_ns()}"
    numbered = [{**row, "number": i} for i, row in enumerate(rows)]
    file.write_text("".join(json.dumps(row) + "\n" for row in numbered))
    config = PrepareConfig((str(file),), similarity=similarity, most_repeated=1.0, unfinished=False)
    prepare(config, str(out), lambda line: None)
    lines = (out / "train.jsonl").read_text().splitlines()
    kept_numbers = {json.loads(line)["number"] for line in lines}
    edit_of = {row["family"]: row["edit"] for row in rows if row["edit"]}
    seen: set[int] = set()
    counts = {name: [0, 0] for name in EDITS}  # [taken out, all] of the rows that come again
    wrong = 0
    for row in numbered:
        is_removed = row["number"] not in kept_numbers
        if row["family"] in seen:
            count = counts[edit_of[row["family"]]]
            count[0] += is_removed
            count[1] += 1
        else:
            wrong += is_removed
        seen.add(row["family"])
    right = sum(removed for removed, _ in counts.values())
    return {
        "rows": len(rows),
        "near_duplicates": sum(every for _, every in counts.values()),
        "taken_out": right + wrong,
        "precision": round(right / max(right + wrong, 1), 4),
        "recall": round(right / sum(every for _, every in counts.values()), 4),
        "recall_of": {name: round(removed / every, 4) for name, (removed, every) in counts.items()},
    }


def lines(count: int, seed: int) -> Iterator[str]:
    """Yields short rows: new ones, copies, edited copies, and those of one template."""
    rng = random.Random(seed)
    names = ["".join(rng.choices(string.ascii_lowercase, k=7)) for _ in range(VOCABULARY)]
    pool: list[tuple[str, str]] = []
    for i in range(count):
        kind = rng.random()
        if kind < 0.2 and pool:
            question, answer = rng.choice(pool)
            question = question if kind < 0.1 else _changed(rng, question, 1, False)
        elif kind < 0.4:
            expression = f"{rng.randrange(10**6)} + {rng.randrange(10**6)}"
            question = f"State the final answer to the following arithmetic problem: {expression} ="
            answer = f"<answer>{rng.randrange(10**6)}</answer>"
        else:
            words = [names[int(VOCABULARY * rng.random() ** 2)] for _ in range(32)]
            question, answer = " ".join(words[:16]) + "?", " ".join(words[16:]) + "."
        if len(pool) < 10_000:
            pool.append((question, answer))
        else:
            pool[rng.randrange(10_000)] = (question, answer)
        yield json.dumps({"prompt": question, "completion": answer, "number": i}) + "\n"


def cost(count: int, folder: Path) -> dict[str, Any]:
    """Returns the seconds and memory of the command on `count` lines."""
    file = folder / "lines.jsonl"
    with file.open("w") as out:
        out.writelines(lines(count, 0))
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "compass_jax", "prepare-sft", "--data", str(file)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        [*command, "--out", str(folder / "lines")], check=True, stdout=subprocess.DEVNULL
    )
    took, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads((folder / "lines" / "report.json").read_text())
    return {
        "lines": count,
        "bytes": file.stat().st_size,
        "kept": report["rows_kept"],
        "taken": {name: n for name, n in report["removed"].items() if n},
        "wall_s": round(took, 1),
        "processor_s": round(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1
        ),
        "peak_mib": round(after.ru_maxrss / 1024),
        "bytes_a_kept_row": round(
            (after.ru_maxrss * 1024 - _least(folder)) / max(report["rows_kept"], 1)
        ),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }


def _least(folder: Path) -> int:
    """Returns the bytes that the command takes for one row: its imports."""
    file = folder / "one.jsonl"
    file.write_text(next(lines(1, 0)))
    code = (
        "import resource, sys; from compass_jax.commands.cli import main; main(sys.argv[1:]);"
        " print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    command = [sys.executable, "-c", code, "prepare-sft", "--data", str(file)]
    done = subprocess.run(
        [*command, "--out", str(folder / "one")], check=True, capture_output=True, text=True
    )
    return int(done.stdout.split()[-1])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6000, help="Rows before the edits")
    parser.add_argument("--lines", type=int, default=1_000_000, help="Short lines; 0: none")
    parser.add_argument("--out", default="", help="This file gets the JSON")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder, rows = Path(temporary), corpus(args.rows, 0)
        result: dict[str, Any] = {"command": f"{COMMAND} --rows {args.rows} --lines {args.lines}"}
        result["thresholds"] = {}
        for threshold in THRESHOLDS:
            result["thresholds"][str(threshold)] = found_in(rows, folder, threshold)
        rule, sample.numbers_in = sample.numbers_in, lambda words: []
        try:
            result["without_numbers"] = found_in(rows, folder, 0.7)
        finally:
            sample.numbers_in = rule
        if args.lines:
            result["cost"] = cost(args.lines, folder)
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
