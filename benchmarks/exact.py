"""Experiment: are log-probs of rollout and training equal bit for bit, and what does it cost?

    python -m benchmarks.exact [--dtype float32] [--default] [--tokens 100000]
        [--only schedule mesh cost]

The model of configs/tiny_reasoning_cpu.py with random weights samples answers with the engine, and
training's scoring pass (step.score) computes their log-probs, with the routes of the rollout (R3)
and live (off). Products, sums and attention are computed in tiles of a fixed size
(benchmarks/exact_model.py), or with --default as the package does. A line of `schedule` or `mesh`
has the share of tokens whose two log-probs are equal bit for bit, and the largest difference. Over
schedules the number of slots, the order of samples, the length of the cache and the size of
micro-batches change; over meshes of eight simulated devices the rows' placement. `first` is the
share of tokens whose token and log-prob in the rollout are those of the first schedule. `cost` has
tokens per second of the rollout, of scoring, and of forward and backward pass together. Lines are
appended to benchmarks/results/exact.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import exact_model
from compass_jax.commands.configs.tiny_reasoning_cpu import tiny_reasoning_cpu
from compass_jax.config import MeshConfig, RunConfig
from compass_jax.data.prompts import train_prompts
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.devices.sharding import move, placements
from compass_jax.model.params import place
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.rl.bucketing import plan
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose
from compass_jax.training import step
from compass_jax.training.scored import Sequences, put_rows, sequences
from compass_jax.weights.sync import sync_weights

SAMPLES = 8  # answers to a prompt
MEAN = 52  # tokens of an answer, at least


class Schedule(NamedTuple):
    """The schedule of a rollout, and the tokens of a micro-batch of training."""

    slots: int = 128
    cache_bucket: int = 32
    shuffled: bool = False
    micro_tokens: int = 4096
    mesh: MeshConfig = MeshConfig()


SCHEDULES = (
    Schedule(),
    Schedule(slots=24, micro_tokens=1000),
    Schedule(slots=7, cache_bucket=112, micro_tokens=9000),
    Schedule(slots=40, shuffled=True, micro_tokens=200),
)
MESHES = (
    Schedule(mesh=MeshConfig(fsdp=8)),
    Schedule(slots=24, micro_tokens=1000, mesh=MeshConfig(replica=2, fsdp=2, expert=2)),
)


class Recorded(NamedTuple):
    """The samples of a rollout `[b t]`, with the routes `[b t l k]` and seconds that it took."""

    tokens: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    routes: Any
    seconds: float


class Subject:
    """A model with random weights, in one precision and schedule."""

    def __init__(self, config: RunConfig, schedule: Schedule):
        self.config, self.schedule = config, schedule
        rollout = dataclasses.replace(
            config.rollout, slots=schedule.slots, cache_bucket=schedule.cache_bucket
        )
        tokenizer = load_tokenizer(config.data, config.model.vocab_size)
        train, decode = placements(schedule.mesh, None, False)
        known, model, compute = tokenizer.vocab_size, config.model, config.compute
        self.engine = Engine(model, compute, rollout, tokenizer.end_ids, decode, known=known)
        self.model = Transformer(model, compute, placement=train, known=known)
        params = init_params(model, compute, jax.random.key(0))
        self.params = place(params, model, train)
        self.decode, _ = sync_weights(self.params, model, compute.dtype, placement=decode)
        self.prompts = train_prompts(config.data, tokenizer, config.seed)

    def record(self, samples: int) -> Recorded:
        """Samples about `samples` answers."""
        prompts = self.prompts[: -(-samples // SAMPLES)]
        order = None
        if self.schedule.shuffled:
            order = np.random.default_rng(1).random(len(prompts)).tolist()
        started = time.perf_counter()
        collection = Collection(
            self.engine, self.decode, prompts, SAMPLES, Purpose.TRAIN, 0, expected=order
        )
        rollouts = list(collection)
        seconds = time.perf_counter() - started
        shape = len(rollouts), self.engine.config.max_length
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        lengths, logp = np.zeros(shape[0], np.int32), np.zeros(shape, np.float32)
        for x in rollouts:
            first, end = len(x.prompt.tokens), len(x.prompt.tokens) + len(x.response)
            tokens[x.row, :end] = [*x.prompt.tokens, *x.response]
            logp[x.row, first:end] = x.logp[-len(x.response) :]
            lengths[x.row], mask[x.row, first:end] = end, True
        return Recorded(tokens, lengths, mask, logp, collection.routes, seconds)

    def micro_batches(self, recorded: Recorded, replay: bool):
        """Yields (micro-batch, inputs of the model), with the rollout's routes or live ones."""
        placement = self.model.placement
        multiple = 1 if placement is None else placement.rows_multiple
        sizes = self.config.rl.buckets, self.schedule.micro_tokens
        for micro in plan(recorded.lengths, *sizes, rows_multiple=multiple):
            inputs: Sequences = sequences(recorded, micro, recorded.routes if replay else None)
            if placement is not None and inputs.routes is not None:
                spec = placement.spec(inputs.routes.shape, ("batch", "tokens", None, None))
                inputs = inputs._replace(routes=move(inputs.routes, placement.sharding(*spec)))
            yield micro, inputs

    def score(self, recorded: Recorded, replay: bool) -> np.ndarray:
        """Returns the log-probs `[b t]` of the training's scoring pass."""
        logp = np.zeros_like(recorded.logp)
        for micro, inputs in self.micro_batches(recorded, replay):
            put_rows(logp, micro, step.score(self.model, self.params, *inputs, temperature=1.0)[0])
        return logp

    def differentiate(self, recorded: Recorded) -> None:
        """Runs forward and backward pass, with replay."""
        for _, inputs in self.micro_batches(recorded, True):
            out, pullback = step.forward_and_pullback(
                self.model, self.params, *inputs[:3], 1.0, inputs.segments, inputs.predicted
            )
            cotangents = out[0], jnp.zeros_like(out[3].probs)
            jax.block_until_ready(step.pull(self.model, self.params, pullback, cotangents))


def configured(dtype: str) -> RunConfig:
    """Returns the configuration in one precision."""
    config = tiny_reasoning_cpu()
    return dataclasses.replace(config, compute=dataclasses.replace(config.compute, dtype=dtype))


def compared(a: np.ndarray, b: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Returns the share of equal values and the largest difference."""
    return {
        "equal": float(np.mean(a[mask] == b[mask])),
        "largest_nats": float(np.abs(a - b)[mask].max()),
    }


def measure(
    config: RunConfig, schedule: Schedule, samples: int, first: Recorded | None = None
) -> tuple[dict[str, Any], Recorded]:
    """Returns a row of the table, and the rollout."""
    subject = Subject(config, schedule)
    recorded = subject.record(samples)
    row: dict[str, Any] = {"tokens": int(recorded.mask.sum())}
    for mode in ("R3", "off"):
        row[mode] = compared(subject.score(recorded, mode == "R3"), recorded.logp, recorded.mask)
    if first is not None:
        # fewer samples, and a length of the cache that is a multiple of another bucket
        n, t = (min(x) for x in zip(first.tokens.shape, recorded.tokens.shape, strict=True))
        equal = first.tokens[:n, :t] == recorded.tokens[:n, :t]
        equal &= first.logp[:n, :t] == recorded.logp[:n, :t]
        row["first"] = float(equal[recorded.mask[:n, :t]].mean())
    return row, recorded


def cost(config: RunConfig, samples: int, rounds: int = 3) -> dict[str, Any]:
    """Returns the median tokens per second of each part."""
    subject = Subject(config, Schedule())
    rates: dict[str, list[float]] = {"rollout": [], "score": [], "gradient": []}
    for i in range(rounds + 1):
        recorded = subject.record(samples)
        total = int(recorded.lengths.sum())
        started = time.perf_counter()
        subject.score(recorded, True)
        scored = time.perf_counter()
        subject.differentiate(recorded)
        end = time.perf_counter()
        if i:  # the first round compiles
            rates["rollout"].append(int(recorded.mask.sum()) / recorded.seconds)
            rates["score"].append(total / (scored - started))
            rates["gradient"].append(total / (end - scored))
    return {f"{part}_tokens_per_s": round(float(np.median(x))) for part, x in rates.items()}


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exact.jsonl"))
    parser.add_argument("--tokens", type=int, default=100_000, help="of the first schedule")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--default", action="store_true", help="without tiles")
    kinds = ("schedule", "mesh", "cost")
    parser.add_argument("--only", nargs="*", default=["schedule", "cost"], choices=kinds)
    options = parser.parse_args(argv)
    if not options.default:
        exact_model.install()
    config = configured(options.dtype)

    def write(kind: str, row: dict[str, Any]) -> None:
        row = {"kind": kind, "dtype": options.dtype, "exact": not options.default, **row}
        print(json.dumps(row), flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")

    first = None
    for kind, cases in (("schedule", SCHEDULES), ("mesh", MESHES)):
        for schedule in cases if kind in options.only else ():
            tokens = options.tokens // (1 if first is None else 5)
            row, recorded = measure(config, schedule, tokens // MEAN, first)
            first = first or recorded
            settings = {k: v for k, v in schedule._asdict().items() if k != "mesh"}
            mesh = {k: v for k, v in dataclasses.asdict(schedule.mesh).items() if v > 1}
            write(kind, {**settings, "mesh": mesh, **row})
    if "cost" in options.only:
        write("cost", cost(config, 192))


if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
    main()
