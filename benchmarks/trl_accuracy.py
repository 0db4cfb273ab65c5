"""Held-out accuracy of GRPO after equal minutes, and after equal steps, compared with TRL's
GRPOTrainer.

    compass pipeline smollm2_135m_cpu      its first two stages make the start
    python -m benchmarks.trl_accuracy --trl PYTHON [--start runs/smollm2_135m_cpu/02-sft]
                                      [--minutes 25] [--seed 0] [--out runs/trl_accuracy]

Both train SmolLM2-135M, after SFT on the worked solutions of configs/smollm2_135m_cpu.py, on the
questions of that file: adapters of rank 16, 8 prompts of 8 samples, one update a step, a reward of
1 for a right total. They run at the same time, each on a separate processor, so that a change of
the machine's speed meets both, and end with the step that is running when the minutes are over;
start and compilation count. Ours are the defaults of `compass train --model`; TRL has the
micro-batches that were fastest in benchmarks.against_trl. Afterwards the start, both ends, and ours
after as many steps as TRL made are evaluated alike on the same 200 held-out questions: two sampled
answers and a greedy one each. The last line is JSON; paired differences are from TRL to ours, with
their 95% intervals.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.against_trl import TRL, Case, run_ours, run_trl, versions
from benchmarks.experiments import commit
from compass_jax.commands.configs import smollm2_135m_cpu
from compass_jax.config import RunConfig
from compass_jax.config.data import HELDOUT
from compass_jax.data.prompts import train_prompts
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.devices.allocator import tune_allocator
from compass_jax.experience.evaluate import evaluate_weights
from compass_jax.experience.paired import compare, read_evaluation
from compass_jax.weights.convert import export_hf

CASE = Case("smollm2_lora", new_tokens=60, lora_rank=16, learning_rate=5e-4, columns=("answer",))
ROWS = 32  # of a micro-batch of TRL
CORES = {"ours": "0", "trl": "1"}
REWARD = '''
def score(response, answer):
    """1 for a text whose last <answer> is the number, else 0."""
    _, start, rest = response.rpartition("<answer>")
    given, end, _ = rest.partition("</answer>")
    return float(bool(start and end) and given.strip() == answer)
'''


def configs(model: str) -> tuple[RunConfig, RunConfig]:
    """Returns the pipeline's configurations of RL and of the evaluation, with a tokenizer."""
    _, _, rl, evaluation, _ = smollm2_135m_cpu.pipeline().stages
    with_tokenizer = [
        replace(run, init_from="", data=replace(run.data, tokenizer=model))
        for run in (rl.settings["run"], evaluation.settings["run"])
    ]
    return with_tokenizer[0], with_tokenizer[1]


def make(folder: Path, start: str, seed: int) -> None:
    """Writes the model's folder, the training prompts, the reward and TRL's script."""
    folder.mkdir(parents=True)
    export_hf(start, folder / "model")
    data = configs(str(folder / "model"))[0].data
    with open(folder / "prompts.jsonl", "w") as file:
        for prompt in train_prompts(data, Tokenizer.load(data.tokenizer), seed, lambda _: None):
            system = {"role": "system", "content": data.system_prompt}
            question = {"role": "user", "content": prompt.question}
            file.write(json.dumps({"prompt": [system, question], "answer": prompt.answer}) + "\n")
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "with_trl.py").write_text(TRL)


def train(folder: Path, python: str, seconds: float, seed: int) -> dict[str, dict[str, Any]]:
    """Runs both trainers at the same time; returns the steps and the peak memory of each."""
    many = 100_000  # steps; the minutes end first
    changes = {"rl.steps": many, "rl.save-every": 1, "keep-checkpoints": many, "seed": seed}
    choice = {
        "rows": ROWS,
        "attention": "sdpa",
        "experts": "",
        "steps": many,
        "seed": seed,
        "seconds": seconds,
        "save": str(folder / "trl_end"),
    }
    with ThreadPoolExecutor(2) as threads:
        compass = threads.submit(run_ours, CASE, folder, changes, CORES["ours"], seconds)
        trl = threads.submit(run_trl, CASE, folder, python, choice, CORES["trl"])
        (rows, ours_peak), (result, trl_peak) = compass.result(), trl.result()
    return {
        "ours": {"steps": len(rows), "peak_gib": round(ours_peak, 2)},
        "trl": {"steps": len(result["steps"]), "peak_gib": round(trl_peak, 2)},
    }


def evaluate(folder: Path, steps: Mapping[str, int]) -> dict[str, Any]:
    """Evaluates the start, both ends, and ours after TRL's steps; returns the accuracies and the
    differences from TRL to ours.
    """
    (checkpoints,) = folder.glob("runs/*/rl/checkpoints")
    weights = {
        "start": folder / "model",
        "trl": folder / "trl_end",
        "ours": checkpoints / f"step_{steps['ours']:08d}",
        "ours after TRL's steps": checkpoints / f"step_{min(steps.values()):08d}",
    }
    config = configs(str(folder / "model"))[1]
    files = {}
    for name, place in weights.items():
        out = folder / "evaluations" / name
        if not (out / "summary.json").exists():
            evaluate_weights(config, str(place), str(out))
        files[name] = read_evaluation(str(out))
    result: dict[str, Any] = {}
    for name in weights:
        sets = compare(files["trl"], files[name])["sets"][HELDOUT]
        result[name] = {size: sets[size] for size in ("avg_at_k", "greedy")}
    return result


def main(argv: list[str] | None = None) -> int:
    """Prints the accuracies as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", metavar="PYTHON", required=True, help="a Python with trl and peft")
    parser.add_argument("--start", default="runs/smollm2_135m_cpu/02-sft", help="a run directory")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/trl_accuracy"), help="a new folder")
    options = parser.parse_args(argv)
    tune_allocator()
    folder = options.out.absolute()
    if not (folder / "steps.json").exists():
        make(folder, options.start, options.seed)
        run = {
            "commit": commit(),
            "environment": versions(options.trl),
            "minutes": options.minutes,
            "seed": options.seed,
            **train(folder, options.trl, 60 * options.minutes, options.seed),
        }
        (folder / "steps.json").write_text(json.dumps(run))
    run = json.loads((folder / "steps.json").read_text())
    steps = {side: run[side]["steps"] for side in CORES}
    print(json.dumps({**run, "accuracy": evaluate(folder, steps)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
