"""Real tokens a second of SFT with and without `sft.packing`, on conversations of log-normal
lengths.

    python -m benchmarks.packing [--rounds 5] [--out runs/packing]

Both sides are the SFT trainer over the same file, with the same updates in the same order and the
three buckets that suit the lengths best. The first pass over the updates compiles and is not timed;
then rounds of the same updates alternate, the side that begins too. The last line is one of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from compass_jax.config import DataConfig, ModelConfig, MoEConfig, RunConfig, SFTConfig
from compass_jax.rl.bucketing import best_buckets
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training.session import RunState
from compass_jax.training.sft import SFTTrainer

TOKENIZER = Path(__file__).parent.parent / "configs" / "tiny_tokenizer"
MODEL = ModelConfig(
    "qwen3_moe", 512, 128, 2, 4, 2, 32, 256, moe=MoEConfig(experts=8, top_k=2, ffn=128)
)
LONGEST, BATCH, UPDATES = 512, 64, 2  # tokens, conversations of an update, updates of a round


def make_file(path: Path, count: int) -> None:
    """Writes conversations whose answers have log-normal lengths, half of them below 75 tokens."""
    rng = np.random.default_rng(0)
    with open(path, "w") as file:
        for number in range(count):
            words = int(min(rng.lognormal(3.4, 0.9), 230))
            answer = " ".join(str(x) for x in rng.integers(0, 10, words))
            turns = [{"role": "user", "content": f"{number}?"}]
            turns.append({"role": "assistant", "content": answer})
            file.write(json.dumps({"messages": turns}) + "\n")


def trainer_of(out: Path, packing: bool, buckets: tuple[int, ...]) -> SFTTrainer:
    """Returns a trainer before its first update."""
    directory = str(out / ("packed" if packing else "apart"))
    sft = SFTConfig(
        files=(str(out / "rows.jsonl"),),
        reading="memory",
        batch=BATCH,
        buckets=buckets,
        micro_batch_tokens=4 * LONGEST,
        packing=packing,
    )
    data = DataConfig(tokenizer=str(TOKENIZER))
    config = RunConfig("packing", MODEL, run_dir=directory, data=data, sft=sft).validate()
    return SFTTrainer(config, RunState(), Telemetry(directory, 1, "sft", writes=False))


def round_of(trainer: SFTTrainer) -> dict[str, float]:
    """Runs the first updates; returns the real tokens a second, by the clock and of the processors,
    the share of padding and the loss of the last update.
    """
    start = trainer.stream.state()
    clock, processor, tokens = time.perf_counter(), time.process_time(), 0
    for _ in range(UPDATES):
        examples = trainer.stream.next_batch(BATCH)
        tokens += sum(example.size for example in examples)
        metrics, _ = trainer._update(examples)
        jax.block_until_ready(trainer.state)
    trainer.stream.restore(start)
    padding, area = metrics["padding_frac"]
    return {
        "tokens_per_s": tokens / (time.perf_counter() - clock),
        "tokens_per_cpu_s": tokens / (time.process_time() - processor),
        "padding_frac": float(padding / area),
        "loss": float(metrics["loss"][0]),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measures; prints and returns the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="runs/packing")
    args = parser.parse_args(argv)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    make_file(out / "rows.jsonl", BATCH * UPDATES)
    every = trainer_of(out, False, (LONGEST,)).stream.next_batch(BATCH * UPDATES)
    lengths = [example.size for example in every]
    buckets = best_buckets(lengths, 3, LONGEST)
    sides = {name: trainer_of(out, name == "packed", buckets) for name in ("apart", "packed")}
    first = {name: round_of(trainer) for name, trainer in sides.items()}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(args.rounds):
        order = list(sides)[:: 1 if number % 2 else -1]
        rounds.append({name: round_of(sides[name]) for name in order})
    report: dict[str, Any] = {"buckets": buckets, "mean_tokens": float(np.mean(lengths))}
    for name in sides:
        report[name] = {
            key: statistics.median(one[name][key] for one in rounds) for key in first[name]
        }
    for key in ("tokens_per_s", "tokens_per_cpu_s"):
        report[f"ratio_{key}"] = report["packed"][key] / report["apart"][key]
    report["loss_difference_first_pass"] = abs(first["packed"]["loss"] - first["apart"]["loss"])
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main()
