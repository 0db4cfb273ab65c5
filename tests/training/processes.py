"""Jobs of several real `compass` processes over loopback, each with separate devices, and a
configuration file for them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import quick_compile

TESTS = Path(__file__).parent.parent
PATIENCE_S = 200
JUDGE_TOKENIZER = str(TESTS.parent / "configs" / "tiny_judge_tokenizer")
CONFIG = """
from dataclasses import replace

from compass_jax.base.records import stable_id
from compass_jax.rewards.judges import judging
from compass_jax.data.predictors.state import State
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.config import (
    EngineJudgeConfig, FileSource, MeshConfig, ScalarJudgeConfig,
    ZeroVarianceConfig, named_correction,
)
from replaying import GroupReplay
from tiny_run import tiny_run


_REWARD_MODEL = {judge!r}
_TOKENIZER = {tokenizer!r}


def _of_pairs(config, pairs):
    # A judge's training: a question to it has about 100 of these tokens, and its verdict one.
    sft = dict(preferences=(pairs,), procedural=(), steps=4, batch=8, buckets=(120,))
    source = FileSource(pairs, verifier="verdict")
    lengths = dict(prompt_buckets=(112,), max_new_tokens=8, cache_bucket=60)
    data = dict(sources=(source,), tokenizer=_TOKENIZER, eval_prompts=8, heldout_frac=0.5)
    rl = replace(config.rl, steps=1, buckets=(120,), micro_batch_tokens=1920)
    return {{
        "model": replace(config.model, max_positions=256),
        "data": replace(config.data, **data),
        "rollout": replace(config.rollout, **lengths),
        "sft": replace(config.sft, micro_batch_tokens=1920, **sft),
        "rl": rl,
    }}


def _judged(config, judge):
    # The tiny model's words are no verdicts: their hash stands in.
    judging.verdict = lambda text: stable_id(text) % 3 - 1
    source = FileSource({rows!r}, verifier="judge")
    return {{
        "model": replace(config.model, max_positions=4096),
        "data": replace(config.data, sources=(source,), heldout_frac=0.0, eval_prompts=0),
        "rewards": replace(config.rewards, judge=judge),
    }}


def processes():
    config = tiny_run()
    # ESPO clips at ratios of 1e-5, where the order of a sum decides
    objective, correction = Grpo(), named_correction("tis")
    rl = replace(config.rl, objective=objective, correction=correction, steps=4)
    rl = replace(rl, {rl})
    model, rollout = replace(config.model, layers=1), replace(config.rollout, max_new_tokens=8)
    data = replace(config.data, eval_prompts=0)
    config = replace(config, rl=rl, model=model, rollout=rollout, data=data)
    return replace(config, {run})
"""


def environment(devices: int) -> dict[str, str]:
    """Returns the environment of a process with `devices` simulated devices."""
    inherited = ("COV_", "COMPASS_", "XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    needed = ("COMPASS_SAMPLERS_KEY",)
    out = {k: v for k, v in os.environ.items() if k in needed or not k.startswith(inherited)}
    out |= {"PYTHONPATH": str(TESTS), "JAX_PLATFORMS": "cpu"}
    return out | quick_compile.asked(out, devices)


def free_port() -> int:
    """Returns a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_config(folder: Path, rl: str = "", run: str = "") -> Path:
    """Writes the configuration file and returns its path. `rl` and `run` change config.rl and the
    run, as arguments of dataclasses.replace.
    """
    file = folder / "processes.py"
    rows = folder / "open.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"Say {n}.", "answer": "No."}) + "\n" for n in range(8))
    )
    judge = str(folder.parent / "judge")
    settings = {"rl": rl, "run": run, "rows": str(rows), "judge": judge}
    file.write_text(CONFIG.format(**settings, tokenizer=JUDGE_TOKENIZER))
    return file


class Job:
    """A command, or a module with a main function, in `count` processes that have eight devices
    together. The output of a process is in `folder`/log_<number>.txt.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        *options: str,
        command: str = "train",
        module: str = "",
        rl: str = "",
        run: str = "",
    ):
        file = write_config(folder, rl, run)
        self.directory, self.logs = (
            folder / "run",
            [folder / f"log_{number}.txt" for number in range(count)],
        )
        arguments = [module] if module else ["compass_jax", command]
        arguments += [str(file), "--run-dir", str(self.directory), *options]
        port, self.processes = free_port(), []
        for number, path in enumerate(self.logs):
            cluster_variables = {
                "COMPASS_COORDINATOR": f"127.0.0.1:{port}",
                "COMPASS_PROCESSES": str(count),
                "COMPASS_PROCESS_ID": str(number),
            }
            variables = environment(8 // count) | (cluster_variables if count > 1 else {})
            with path.open("wb") as log:
                command_line = [sys.executable, "-m", *arguments]
                self.processes.append(
                    subprocess.Popen(
                        command_line, env=variables, stdout=log, stderr=log, cwd=TESTS.parent
                    )
                )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def log(self, number: int) -> str:
        """Returns the output of process `number`."""
        return self.logs[number].read_text(errors="replace")

    def steps(self) -> int:
        """Returns the number of lines of metrics.jsonl so far."""
        file = self.directory / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds, and fails if a process ends before."""
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            assert (
                all(process.poll() is None for process in self.processes)
                and time.monotonic() < limit
            ), self.log_tails()
            time.sleep(0.01)

    def send(self, number: int, what: signal.Signals) -> None:
        """Sends a signal to one process."""
        self.processes[number].send_signal(what)

    def codes(self) -> list[int]:
        """Waits until all processes have ended; returns their exit codes."""
        limit = time.monotonic() + PATIENCE_S
        try:
            return [process.wait(max(0.0, limit - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log_tails()) from None

    def finish(self, status: int = 0) -> None:
        """Waits for the end of the job and checks its exit status (143 after a stop on request)."""
        assert self.codes() == [status] * len(self.processes), self.log_tails()

    def log_tails(self) -> str:
        """Returns the ends of all logs."""
        return "\n".join(f"--- process {n}\n{self.log(n)[-3000:]}" for n in range(len(self.logs)))
