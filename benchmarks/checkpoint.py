"""Seconds for which a save blocks the training, in the background and until it is on the disk.

    python -m benchmarks.checkpoint [--out runs/checkpoint] [--gib 2] [--rounds 7] [--smoke]

The state is random float32 arrays, which hardly compress. A step updates all of it in place, as an
optimiser does. Each round saves it both ways, the first of the two alternating: `on disk` is
`checkpoint.save`, which returns when the checkpoint is written, digested and flushed; `background`
is `Checkpoints.save`, after which five steps run. `step` is a step's time with no save, `step
beside a save` the mean of those five, `written` the time until the background save is on the disk,
and `verify` the check that a restore makes before it reads. The last line is one of JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks.common import cores, environment, report, say, seconds
from compass_jax.config import ModelConfig
from compass_jax.weights import checkpoint, sound

MODEL = ModelConfig("qwen3", 10, 8, 1, 1, 1, 8, 8)
LEAF = 64 * 2**20  # bytes
STEPS = 5


def arrays_of(size: int) -> dict[str, jax.Array]:
    """Returns random leaves of `size` bytes together."""
    keys = jax.random.split(jax.random.key(0), max(1, size // LEAF))
    shape = (size // len(keys) // 4,)
    arrays = {f"leaf_{i}": jax.random.normal(key, shape) for i, key in enumerate(keys)}
    return jax.block_until_ready(arrays)


@partial(jax.jit, donate_argnums=0)
def step(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the arrays after an update, in the memory of the given ones."""
    return jax.tree.map(lambda x: x * 0.999 + 0.001, arrays)


class State:
    """The arrays of a training, and the step that updates them."""

    def __init__(self, arrays: dict[str, jax.Array]):
        self.arrays = arrays

    def step(self) -> None:
        """Runs one step and waits for it."""
        self.arrays = jax.block_until_ready(step(self.arrays))


def in_background(run: Path, state: State, number: int) -> dict[str, float]:
    """Returns the seconds of one save in the background and of the steps during it."""
    timings = {}
    with checkpoint.Checkpoints(run, MODEL, keep=1) as checkpoints:
        checkpoints.save(number, {"x": state.arrays["leaf_0"][:1]}, {}, wait=True)  # opens orbax
        save = partial(checkpoints.save, number + 1, state.arrays, {})
        timings["background"] = seconds(save)
        step_times = [seconds(state.step) for _ in range(STEPS)]
        timings["written"] = timings["background"] + sum(step_times) + seconds(checkpoints.wait)
    timings["step_beside_a_save"] = sum(step_times) / STEPS
    return timings


def one_round(run: Path, state: State, number: int) -> dict[str, float]:
    """Returns the seconds of both ways to save; the first of them alternates."""
    timings = {"step": min(seconds(state.step) for _ in range(STEPS))}
    for way in ("on disk", "background") if number % 2 else ("background", "on disk"):
        shutil.rmtree(run, ignore_errors=True)
        if way == "background":
            timings |= in_background(run, state, number)
        else:
            save = partial(checkpoint.save, run, number, state.arrays, {}, model=MODEL)
            timings["on_disk"] = seconds(save)
            location = checkpoint.locate(run)
            timings["verify"] = seconds(partial(sound.examine, location))
    return {name: round(value, 4) for name, value in timings.items()}


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the table and the line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "where checkpoints are written, and removed (default: %(default)s)"
    parser.add_argument("--out", default="runs/checkpoint", help=text)
    parser.add_argument("--gib", type=float, default=2.0, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a toy state: shows that it works")
    args = parser.parse_args(argv)
    out = Path(args.out)
    state = State(arrays_of(2**22 if args.smoke else int(args.gib * 2**30)))
    one_round(out, state, 0)  # compiles, imports, and fills the page cache
    rounds = []
    for number in range(args.rounds):
        rounds.append(one_round(out, state, number))
        say(f"round {number + 1}: {json.dumps(rounds[-1])}")
    shutil.rmtree(out)
    size = sum(x.nbytes for x in state.arrays.values())
    names = sorted(rounds[0])
    medians = {name: statistics.median(row[name] for row in rounds) for name in names}
    print("| medians, seconds | |\n|---|---|")
    for name, value in medians.items():
        print(f"| {name.replace('_', ' ')} | {value:.3f} |")
    summary: dict[str, Any] = {"bytes": size, "device": jax.devices()[0].device_kind, **medians}
    details = {"cores": cores(), "per_round": rounds}
    report("checkpoint", args.smoke, summary, details, environment())


if __name__ == "__main__":
    main()
