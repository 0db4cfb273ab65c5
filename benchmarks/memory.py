"""Peak memory of real runs, compared with the estimate of `compass train --dry-run`.

    python -m benchmarks.memory [CONFIG | MODEL_FOLDER ROWS] [SETTINGS]

The command runs two steps of a configuration (default: tiny_reasoning_cpu), or of a model's folder
on a file of rows, in a separate process, and prints one line of JSON: estimate_gib, peak_gib,
ratio.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHORT = ("--rl.steps", "2", "--data.eval-prompts", "0", "--rl.save-every", "0")
SHORT += ("--rl.eval-every", "0")


def main(words: list[str]) -> dict[str, float]:
    """Runs the two steps; prints and returns the numbers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*_command(words), *SHORT, "--run-dir", folder]
        dry = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True)
        line = next(x for x in dry.stdout.splitlines() if x.strip().startswith("memory"))
        estimate = float(line.split("about ")[1].split(" GiB")[0])
        peak = peak_of(command)
        logged = Path(folder, "metrics.jsonl").read_text().splitlines()[-1]
    result = {
        "estimate_gib": estimate,
        "peak_gib": round(peak, 2),
        "logged_gib": round(json.loads(logged)["metrics"]["memory/peak_gib"], 2),
        "ratio": round(estimate / peak, 3),
    }
    print(json.dumps(result))
    return result


def _command(words: list[str]) -> list[str]:
    head, settings = words[:2], words[2:]
    if not head or head[0].startswith("-"):
        head, settings = ["tiny_reasoning_cpu"], words
    if Path(head[0]).is_dir():
        start = ["--model", head[0], "--data", head[1]]
    else:
        start, settings = head[:1], [*head[1:], *settings]
    return [sys.executable, "-m", "compass_jax", "train", *start, *settings]


def peak_of(command: list[str]) -> float:
    """Returns the peak resident memory of a command's process in GiB. Raises RuntimeError if the
    command fails.
    """
    peak = 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                status = ""
            for line in status.splitlines():
                if line.startswith("VmHWM:"):
                    peak = max(peak, int(line.split()[1]) / 2**20)
            time.sleep(0.2)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
    return peak


if __name__ == "__main__":
    main(sys.argv[1:])
