"""The cost of a merge: seconds and memory of `compass merge` on two random parents of many
gigabytes.

    python -m benchmarks.merge [--out runs/merge] [--gib 2] [--method ties] [--smoke]

Base and parents are Qwen3-MoE folders in bfloat16, in shards of a quarter of their size; the
parents' entries all differ from the base's. The command runs in a separate process, whose peak of
resident memory the kernel records (VmHWM); it counts pages of files that are mapped too. Everything
written is removed. The last line is one of JSON.
"""

from __future__ import annotations

import argparse
import math
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from benchmarks.common import cores, environment, report, say
from compass_jax.apps.curate.merge import METHODS
from compass_jax.config import ModelConfig, MoEConfig
from compass_jax.model.params import abstract_params
from compass_jax.weights.hf import parameters_of, save_params

MODELS = ("base", "first", "second")
POLL_S = 0.02
ROW = 4_194_319  # entries, a prime


def model_of_size(size: int, smoke: bool) -> ModelConfig:
    """Returns an MoE model whose bfloat16 weights have `size` bytes, and at most a layer more."""
    hidden, experts, vocab = (32, 4, 64) if smoke else (1024, 32, 32_000)
    moe = MoEConfig(experts=experts, top_k=2, ffn=hidden // 2)
    layer = 3 * experts * moe.ffn * hidden + 4 * hidden * hidden
    layers = max(1, math.ceil((size / 2 - 2 * vocab * hidden) / layer))
    return ModelConfig(
        "qwen3_moe", vocab, hidden, layers, 8, 8, hidden // 8, 2 * hidden, max_positions=64, moe=moe
    )


def write_model(folder: Path, config: ModelConfig, number: int) -> None:
    """Writes a folder of random weights; those of number 1 and 2 are near those of number 0.

    Each leaf repeats one row of random numbers, from a different place on: drawing billions of them
    would take longer than merging.
    """
    leaves, structure = jax.tree.flatten(abstract_params(config, "bfloat16"))
    row = 0.02 * np.random.default_rng(0).standard_normal(ROW, np.float32)
    if number:
        row += 0.002 * np.random.default_rng(number).standard_normal(ROW, np.float32)
    stored = row.astype(ml_dtypes.bfloat16)
    values = [np.resize(np.roll(stored, 997 * i), leaf.shape) for i, leaf in enumerate(leaves)]
    size = sum(value.nbytes for value in values)
    save_params(structure.unflatten(values), config, folder, "bfloat16", size // 4)


class Cost(NamedTuple):
    """The cost of a command: its peak of resident memory, and seconds on the clock and of the
    processors.
    """

    peak_bytes: int
    seconds: float
    cpu_seconds: float


def cost_of(command: Sequence[str]) -> Cost:
    """Runs a command and returns its cost. Raises SystemExit if the command fails."""
    started, spent, peak = time.perf_counter(), _children_s(), 0
    with subprocess.Popen(command, stdout=sys.stderr) as child:
        while child.poll() is None:
            try:
                text = Path(f"/proc/{child.pid}/status").read_text()
            except OSError:
                break
            if match := re.search(r"VmHWM:\s+(\d+) kB", text):
                peak = int(match[1]) * 1024
            time.sleep(POLL_S)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit status {child.returncode}")
    return Cost(peak, time.perf_counter() - started, _children_s() - spent)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(argv: list[str] | None = None) -> None:
    """Measures and prints the line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="runs/merge", help="(default: %(default)s)")
    parser.add_argument("--gib", type=float, default=2.0, help="size of a model: %(default)s")
    parser.add_argument("--method", nargs="+", default=["ties"], choices=METHODS)
    parser.add_argument("--smoke", action="store_true", help="toy models: shows that it works")
    args = parser.parse_args(argv)
    out, machine = Path(args.out), environment()
    config = model_of_size(2**17 if args.smoke else int(args.gib * 2**30), args.smoke)
    tensors = len(parameters_of(config))
    shutil.rmtree(out, ignore_errors=True)
    for number, name in enumerate(MODELS):
        write_model(out / name, config, number)
        say(f"written: {out / name}")
    size = sum(file.stat().st_size for file in (out / "base").glob("*.safetensors"))
    rows: list[dict[str, Any]] = []
    for method in args.method:
        base, *parents = (str(out / name) for name in MODELS)
        command = [sys.executable, "-m", "compass_jax", "merge", "--base", base, "--models"]
        command += [*parents, "--method", method, "--out", str(out / "merged")]
        cost = cost_of(command)
        rows.append(
            {
                "method": method,
                **{name: round(value, 2) for name, value in cost._asdict().items()},
                "tensors_per_s": round(tensors / cost.seconds, 2),
            }
        )
        say(f"{rows[-1]}")
        shutil.rmtree(out / "merged")
    shutil.rmtree(out)
    sizes = {"model_bytes": size, "tensors": tensors, "cores": cores()}
    report("merge", args.smoke, sizes, {"merges": rows}, machine)


if __name__ == "__main__":
    main()
