"""Which faults: an area for each index, drawn from the seed; workers that try them; the table of
what came of them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import resource
import shutil
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from .words import GOOD, WORDS, Verdict
from .world import Case, World

AREAS = (
    "configuration",
    "rows",
    "pass_rates",
    "weights",
    "tokenizers",
    "templates",
    "checkpoints",
    "requests",
    "answers",
    "run_directories",
    "full_disk",
    "two_processes",
    "clock",
)


class Campaign:
    """One seed's faults, and where they are tried."""

    def __init__(self, folder: Path, seed: int, keep: bool = False, only: tuple[str, ...] = ()):
        self.folder, self.seed, self.keep, self.only = folder, seed, keep, only
        unknown = set(only) - set(AREAS)
        if unknown:
            sys.exit(f"no such area: {', '.join(unknown)}; there are {', '.join(AREAS)}")
        self.modules = {name: importlib.import_module(f".{name}", __package__) for name in AREAS}
        self.world = World(folder / "world")
        self.world.build()

    def area(self, index: int) -> str:
        """The area of a fault."""
        rng = random.Random(f"area {self.seed} {index}")
        return rng.choices(AREAS, [self.modules[name].SHARE for name in AREAS])[0]

    def chosen(self, n: int) -> list[int]:
        """Indices of the first n faults; with `only`, the first n of these areas."""
        if not self.only:
            return list(range(n))
        found, index = [], 0
        while len(found) < n:
            if self.area(index) in self.only:
                found.append(index)
            index += 1
        return found

    def attempt(self, index: int) -> dict[str, Any]:
        """Tries one fault: a row of the campaign's table."""
        area = self.area(index)
        folder = self.folder / "cases" / f"{self.seed}_{index}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        case = Case(self.seed, index, area, folder, self.world)
        began, spent = time.monotonic(), _cpu()
        try:
            verdict = self.modules[area].run(case)
        except Exception:
            verdict = Verdict("harness", traceback.format_exc()[-3000:])
        row = {
            "index": index,
            "area": area,
            "word": verdict.word,
            "why": verdict.why,
            "fault": "; ".join(case.told),
            "seconds": time.monotonic() - began,
            "cpu_s": _cpu() - spent,
        }
        if not self.keep:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
        return row

    def repeat(self, index: int) -> int:
        """Tries one fault again, and says all of it."""
        row = self.attempt(index)
        close_all(self.modules)
        print(json.dumps(row, indent=2))
        print(f"what it left: {self.folder / 'cases' / f'{self.seed}_{index}'}")
        return 0 if row["word"] in GOOD else 1

    def run(self, n: int, workers: int) -> int:
        """Tries n faults with so many processes; prints the table, the faults that were not
        answered well, and one line of JSON.
        """
        began = time.monotonic()
        todo, results = self.chosen(n), [self.folder / f"results_{w}.jsonl" for w in range(workers)]
        queue, feed = os.pipe()
        pids = [self._worker(queue, feed, result) for result in results]
        os.close(queue)
        with open(feed, "wb", buffering=0) as out, contextlib.suppress(BrokenPipeError):
            for index in todo:
                out.write(index.to_bytes(4, "big"))
        failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
        rows = [
            json.loads(line)
            for result in results
            if result.exists()
            for line in result.read_text().splitlines()
        ]
        rows.sort(key=lambda row: row["index"])
        missing = len(todo) - len(rows)
        report(rows, self.seed, time.monotonic() - began)
        if failed or missing:
            print(
                f"the harness failed: {len(failed)} of its processes died, {missing} faults were"
                " not tried"
            )
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        print(json.dumps(counts(rows, n, self.seed)))
        return 0 if not failed and not missing and all(row["word"] in GOOD for row in rows) else 1

    def _worker(self, queue: int, feed: int, result: Path) -> int:
        """A process that tries what it reads from the queue; its id."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.close(feed)
            with result.open("a") as out:
                while word := os.read(queue, 4):
                    row = self.attempt(int.from_bytes(word, "big"))
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                    if row["word"] not in GOOD:
                        print(told(row, self.seed), flush=True)
            close_all(self.modules)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)


def _cpu() -> float:
    """Seconds of CPU of this process and of what it has waited for."""
    return sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def close_all(modules: dict[str, Any]) -> None:
    """Ends what an area keeps running from case to case."""
    for module in modules.values():
        if hasattr(module, "close"):
            module.close()


def told(row: dict[str, Any], seed: int) -> str:
    """A fault that was not answered well, and how to repeat it."""
    return (
        f"{row['word'].upper()} {row['area']} --repeat {seed}:{row['index']} "
        f" {row['fault'][:300]}\n    {row['why'][:600]}"
    )


def counts(rows: list[dict[str, Any]], n: int, seed: int) -> dict[str, int]:
    """The line of JSON."""
    words = Counter(row["word"] for row in rows)
    extra = {"harness": words["harness"]} if words["harness"] else {}
    return (
        {"n": n, "seed": seed, "tried": len(rows)} | {word: words[word] for word in WORDS} | extra
    )


def report(rows: list[dict[str, Any]], seed: int, seconds: float) -> None:
    """Prints the table, and once more all faults that were not answered well."""
    bad = [row for row in rows if row["word"] not in GOOD]
    print(f"\n{len(bad)} of {len(rows)} faults were not answered well" + (":" if bad else ""))
    for row in bad:
        print(told(row, seed))
    print(
        f"\n{'area':16}{'tried':>7}"
        + "".join(f"{word.replace('_', ' '):>13}" for word in WORDS)
        + f"{'seconds':>10}{'cpu, s':>9}{'longest':>9}"
    )
    for area in (*AREAS, None):
        here = [row for row in rows if area in (None, row["area"])]
        words = Counter(row["word"] for row in here)
        if here:
            spent, cpu, most = (
                sum(r["seconds"] for r in here),
                sum(r["cpu_s"] for r in here),
                max(r["seconds"] for r in here),
            )
            line = f"{area or 'all':16}{len(here):7}" + "".join(
                f"{words[word]:13}" for word in WORDS
            )
            print(
                line
                + f"{spent:10.1f}{cpu:9.1f}{most:9.1f}"
                + (f"   harness {words['harness']}" if words["harness"] else "")
            )
    print(f"{seconds:.0f} s")
