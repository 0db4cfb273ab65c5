"""A run that logs a few steps to a tracker, as a program that may be killed.

    python logging_run.py RUN_DIR TRACKER FIRST LAST [kill | ask]

It resumes after step FIRST - 1, as a run does. With "kill" it sends itself SIGKILL after the last
step, as the kernel would.
"""

import io
import os
import signal
import sys
import time

from rich.console import Console

from compass_jax.runs.telemetry import Telemetry
from compass_jax.runs.trackers import services


def value(step):
    """Returns the metrics of a step, the same in every run."""
    return {"reward/mean": step / 8, "policy/kl_k3": float("nan"), "lr": 1e-4 * step}


def main(run_dir, tracker, first, last, how=""):
    services.START_S = 4.0
    console = Console(file=io.StringIO(), width=500)
    with Telemetry(
        run_dir, 9, "rl", console=console, trackers=(tracker,), settings={"name": "own", "seed": 3}
    ) as telemetry:
        telemetry.restore({"metrics": int(first) - 1, "rollouts": 0, "step": int(first) - 1})
        for step in range(int(first), int(last) + 1):
            telemetry.log(step, value(step))
        if how == "kill":
            time.sleep(4)  # the tracker's package is imported by then
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
    print(console.file.getvalue())
    print(f"closed in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
