"""Seconds from a command to the second step of RL: with an empty cache of compiled programs, with a
full one, and those of TRL on the same model, prompts and reward.

    python -m benchmarks.first_steps [--trl PYTHON] [--rounds 3]

PYTHON is an interpreter that has trl (its GRPOTrainer, defaults but for the number of steps). All
processes run one after the other on this machine, in turn; the times without "step 2" are of whole
processes, with the checkpoint and the report that ours leaves. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOKENIZER = Path(__file__).parent.parent / "configs" / "tiny_tokenizer"
REWARD = """
def score(prompt, response):
    return len(set(response)) / 40
"""
TRL = """
import sys
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

def score(completions, **_):
    return [len(set(text)) / 40 for text in completions]

data = load_dataset("json", data_files=sys.argv[2], split="train")
args = GRPOConfig(output_dir=sys.argv[3], max_steps=2, report_to=[], use_cpu=True)
GRPOTrainer(model=sys.argv[1], reward_funcs=score, args=args, train_dataset=data).train()
"""


def make(folder: Path) -> None:
    """Writes a model of 0.4M parameters with transformers, 200 prompts and a reward."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, **heads, **experts, max_position_embeddings=512)
    model = Qwen3MoeForCausalLM(config)
    print(f"{sum(x.numel() for x in model.parameters()):,} parameters", flush=True)
    model.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / "model" / name)
    numbers = random.Random(0)
    with open(folder / "prompts.jsonl", "w") as file:
        for _ in range(200):
            a, b = numbers.randint(1, 50), numbers.randint(1, 50)
            text = f"Anna has {a} apples and buys {b} more. How many does she have?"
            file.write(json.dumps({"prompt": text, "answer": str(a + b)}) + "\n")
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "with_trl.py").write_text(TRL)


def timed(command: list[str], folder: Path, env: dict[str, str]) -> tuple[float, float]:
    """Runs a command; returns the seconds until step 2 is logged (NaN without a metrics.jsonl) and
    until the process ends. Raises RuntimeError with the end of the output if the process fails.
    """
    began, second = time.monotonic(), float("nan")
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=words, stderr=words)
        while process.poll() is None:
            logs = list(folder.glob("runs/*/rl/metrics.jsonl"))
            if second != second and logs and logs[0].read_text().count("\n") >= 2:
                second = time.monotonic() - began
            time.sleep(0.05)
        words.seek(0)
        if process.returncode:
            raise RuntimeError(f"{command[:4]}: {words.read()[-2000:]}")
    return second, time.monotonic() - began


def run_compass(folder: Path, cache: Path) -> tuple[float, float]:
    """Runs two steps of `compass train` in an empty directory (see `timed`)."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    env["XDG_CACHE_HOME"] = str(cache)
    words = "train --model model --data prompts.jsonl --reward my_reward.py:score --rl.steps 2"
    # TRL evaluates nothing
    command = [sys.executable, "-m", "compass_jax", *words.split(), "--data.eval-prompts", "0"]
    return timed(command, folder, env)


def main() -> int:
    """Prints a table, and the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", metavar="PYTHON", help="an interpreter that has trl")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="first_steps_"))
    make(folder)
    names = ("cold, step 2", "cold", "warm, step 2", "warm", "trl")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        cache = folder / f"cache_{number}"
        for name in ("cold", "warm"):
            for key, value in zip(
                (f"{name}, step 2", name), run_compass(folder, cache), strict=True
            ):
                seconds[key].append(value)
        if options.trl:
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
            command = [options.trl, "with_trl.py", "model", "prompts.jsonl", "out"]
            seconds["trl"].append(timed(command, folder, env)[1])
        print({name: f"{x[-1]:.1f} s" for name, x in seconds.items() if x}, flush=True)
    medians = {name: round(statistics.median(x), 1) for name, x in seconds.items() if x}
    print(json.dumps({"steps": 2, "rounds": options.rounds, **medians}))
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
