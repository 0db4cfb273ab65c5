"""A process whose children save checkpoints until the test kills them.

    python saver.py RUN

For each line of its input it forks a child, and prints the child's process id. A child continues
from the newest checkpoint. It prints the value of the arrays whose checkpoint is on the disk.
"""

import os
import random
import sys

import jax.numpy as jnp

from compass_jax.config import ModelConfig
from compass_jax.weights import checkpoint

MODEL = ModelConfig("qwen3", 10, 8, 1, 1, 1, 8, 8)
SHAPE = (3, 120_000)


def save_without_end(run: str) -> None:
    """Saves steps in the background, some of them twice; `value` counts the saves."""
    step, value = 0, 0
    if checkpoint.latest(run) is not None:
        step, value = checkpoint.read_manifest(run).step, checkpoint.read_meta(run)["value"]
    with checkpoint.Checkpoints(run, MODEL, keep=2) as checkpoints:
        while True:
            step, value = step + (random.random() < 0.8 or not step), value + 1
            arrays = {"x": jnp.full(SHAPE, value), "y": jnp.arange(value % 7)}
            checkpoints.save(step, arrays, {"value": value})
            # each save waits for the previous one; a kill cannot split an os.write
            os.write(1, f"{value - 1}\n".encode())


if __name__ == "__main__":
    for _ in sys.stdin:
        if (child := os.fork()) == 0:
            save_without_end(sys.argv[1])
        print("child", child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)
