"""A wall clock that jumps, back or forth, once or often, while a run goes on: its numbers are
those of a clock that does not.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from .checkpoints import STEPS
from .logs import steps
from .words import LOST, Expected, Verdict, judge
from .world import CONFIG, Case

SHARE = 1
JUMPS_S = (-366 * 86400, -30 * 86400, -3600, -1, 3600, 366 * 86400, -1.6e9, 5e9)


def run(case: Case) -> Verdict:
    """One jump, or one at every so many looks at the clock, for `sft` or `train`."""
    jump, after, often = (
        case.rng.choice(JUMPS_S),
        case.rng.choice([0, 3, 20, 60, 150]),
        case.rng.random() < 0.3,
    )
    tuned = case.rng.random() < 0.7
    case.tell(
        f"{'sft' if tuned else 'train'}: the clock jumps by {jump:.0f} s after {after}"
        f" looks{', again and again' if often else ''}"
    )
    case.bring("rows.jsonl", "chats.jsonl", "tokenizer")
    name, argv = ("tuned", ["sft", CONFIG]) if tuned else ("trained", ["train", CONFIG, *STEPS])
    wanted = steps(case.world.made(name, argv) / "run")
    ended = case.compass(argv, before=jumping(jump, after, often, case.rng), seconds=60, cpu_s=90)
    if ended.status == 0 and not ended.timed_out and "Traceback" not in ended.err:
        return (
            Verdict("harmless")
            if steps(case.folder / "run") == wanted
            else Verdict(LOST, "the log is not that of the undisturbed run")
        )
    return judge(ended, Expected([0], ["clock"]))


def jumping(jump: float, after: int, often: bool, rng: random.Random) -> Callable[[], None]:
    """Replaces the clock of the process that calls it."""

    def install() -> None:
        real, looks = time.time, [0]

        def now() -> float:
            looks[0] += 1
            times = looks[0] // max(after, 1) if often else int(looks[0] > after)
            return max(1.0, real() + jump * (times % 2 if often else times))

        time.time = now
        time.time_ns = lambda: int(now() * 1e9)

    return install
