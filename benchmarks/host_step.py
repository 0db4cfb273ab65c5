"""Seconds that the host spends in a step of RL, by part and size, without a model.

    python -m benchmarks.host_step [--sizes 64x30720 4096x480] [--out FILE]

Each size is PROMPTSxTOKENS: 16 answers of TOKENS tokens to each prompt, in groups of up to 32, with
the settings of configs/qwen3_30b_a3b_v5p_4x4x4.py, lengths in proportion. All of an answer's tokens
are drawn at random. The engine and the learner's programs are stubs that return arrays at once, and
their seconds are not counted: what is measured is the code between a step's programs.

    batcher_s      the batcher: slots, queue, and the tokens of each call
    assemble_s     the learner's arrays
    repetition_s   of that, n-grams that repeat
    train_s        Learner.train: preparing updates, rows of micro-batches, scores, diagnostics
    plan_s         of that, the micro-batches of all updates

Seconds are the processor's, of all threads, so that other programs on the machine change them less,
and those of a second step. `host_s` is their sum. `programs_s` are the seconds of the programs that
prepare an update and compare log-probs, which run on the chips of a pod and here on the processor,
and `programs_gib` the arrays that they take from the host; they are no part of `host_s`. A row for
each size is appended to benchmarks/results/host_step.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.experiments import ROOT, append, commit
from compass_jax.base.records import Group, Prompt, Rollout, Score, StepArrays
from compass_jax.commands.configs.qwen3_30b_a3b_v5p_4x4x4 import qwen3_30b_a3b_v5p_4x4x4
from compass_jax.config import ModelConfig, apply
from compass_jax.config.pods import ANSWER, PROMPT
from compass_jax.experience.assemble import assemble, repetition
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.rl.row_plan import row_plan
from compass_jax.rollout.batcher import Batcher
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine_api import ResultTokens
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.training import step
from compass_jax.training.learner import Learner

SIZES = ("64x480", "64x1920", "64x7680", "64x30720", "256x480", "1024x480", "4096x480")
MODEL = ModelConfig("qwen3", 32, hidden=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8)
VOCABULARY = 151_936


class Clock:
    """Seconds of the host, without those inside `outside`."""

    def __init__(self) -> None:
        self.outside_s, self.parts = 0.0, dict[str, float]()

    def second(self, name: str, run: Callable[[], Any]) -> Any:
        """Runs a part of the step twice and measures the second time, when all is compiled and the
        machine has given the process its memory. Returns that result.
        """
        run()
        started, before = time.process_time(), self.outside_s
        result = run()
        outside_s = self.outside_s - before
        self.parts[name] = time.process_time() - started - outside_s
        return result

    def outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, whose seconds are not counted."""

        def call(*args: Any, **options: Any) -> Any:
            started = time.process_time()
            result = function(*args, **options)
            self.outside_s += time.process_time() - started
            return result

        return call


def configured(prompts: int, tokens: int) -> Any:
    """Returns the configuration of a size: the pod's, with lengths in proportion."""
    config, part = qwen3_30b_a3b_v5p_4x4x4(), ANSWER / tokens
    buckets = tuple(round(x / part) for x in config.rl.buckets)
    settings = {
        "rl.prompts_per_step": prompts,
        "rl.buckets": buckets,
        "rl.micro_batch_tokens": round(config.rl.micro_batch_tokens / part),
        "rl.replay": "off",
        "rl.shaping.length_free_tokens": tokens // 2,
        "rollout.max_new_tokens": tokens,
        "rollout.prompt_buckets": (round(PROMPT / part / 2), round(PROMPT / part)),
        "rollout.cache_bucket": buckets[-1] // 8,
        "rollout.prefill_chunk": round(PROMPT / part),
    }
    return apply(dataclasses.replace(config, model=MODEL), settings)


class StubEngine:
    """An engine whose answers have the most tokens, drawn before. `clock` counts its seconds as
    outside.
    """

    placement, slot_groups, end_ids = None, 16, ()

    def __init__(self, rollout: Any, clock: Clock):
        self.config = rollout
        self._rng = rng = np.random.default_rng(0)
        self._shape = shape = rollout.slots, rollout.tokens_per_call + 1
        self._logp = -rng.random(shape, np.float32)
        self._entropy = rng.random(shape, np.float32)
        self._left = np.zeros(rollout.slots, np.int64)  # tokens that each slot will draw
        for name in ("bulk_insert", "generate", "harvest"):
            setattr(self, name, clock.outside(getattr(self, name)))

    def default_sampler(self) -> Sampler:
        """Returns the sampler of the configuration."""
        return Sampler()

    def init_decode_state(self, top_logprobs: int = 0) -> None:
        """Returns no state."""

    def batcher(self, params: Any, purpose: Purpose, seed: int, **options: Any) -> Batcher:
        """Returns a batcher over this engine."""
        engine: Any = self
        return Batcher(engine, params, purpose, seed, **options)

    def route_buffer(self, groups: int, size: int, keep: bool) -> RouteBuffer:
        """Returns a buffer whose routes are one number."""
        return RouteBuffer(lambda rows: jnp.zeros(()), lambda x, rows: x, groups, size)

    def prefill_multisampling(self, *, true_length: Any, rng: Any, **options: Any) -> Any:
        """Returns what the batcher reads of a prefix."""
        return SimpleNamespace(keys=rng, lengths=true_length)

    def bulk_insert(self, prefix: Any, state: Any, slots: Any, most: Any) -> None:
        """Fills slots."""
        slots, most = np.asarray(slots), np.asarray(most)
        rows = np.broadcast_to(most[:, None], slots.shape)
        self._left[slots[slots >= 0]] = rows[slots >= 0]

    def generate(self, params: Any, state: Any, *args: Any, **options: Any) -> tuple[None, Any]:
        """Draws tokens in the live slots."""
        n = self.config.tokens_per_call
        new = np.minimum(self._left, n)
        valid = (np.arange(1, n + 2)[None] > 1) & (np.arange(n + 1)[None] <= new[:, None])
        self._left -= new
        tokens = self._rng.integers(0, VOCABULARY, self._shape, np.int32)
        data = np.concatenate([tokens, valid.astype(np.int32), new[:, None]], axis=1)
        columns = (0, n + 1), (n + 1, 2 * n + 2), (2 * n + 2, 2 * n + 3)
        numbers = self._logp, self._entropy, None, self._left > 0, np.int32(new.max())
        return None, ResultTokens(data.astype(np.int32), *columns, 1, *numbers)

    def harvest(self, state: Any, store: Any, slots: Any, rows: Any) -> Any:
        """Returns the routes as they were."""
        return store


def prompts_of(count: int, longest: int) -> list[Prompt]:
    """Returns prompts of half the longest length and of a quarter, in turns."""
    lengths = [longest // 4 if n % 2 else longest // 2 for n in range(count)]
    return [Prompt.of_tokens(np.arange(x) % 97, n) for n, x in enumerate(lengths)]


def sampled(config: Any, clock: Clock) -> list[Rollout]:
    """Runs the batcher over a step's samples."""
    rl, rollout = config.rl, config.rollout
    engine: Any = StubEngine(rollout, clock)
    prompts = prompts_of(rl.prompts_per_step, rollout.prompt_buckets[-1])
    collection = partial(Collection, engine, None, prompts, rl.group_size, Purpose.TRAIN, 0)
    return clock.second("batcher_s", lambda: list(collection()))


def grouped(rollouts: Sequence[Rollout]) -> list[Group]:
    """Returns the rollouts by prompt, the first quarter of each group's answers right."""
    groups: dict[Any, list[Rollout]] = {}
    for rollout in sorted(rollouts, key=lambda x: x.sample):
        groups.setdefault(rollout.prompt.key, []).append(rollout)
    size = len(rollouts) // len(groups)
    scores = tuple(Score(float(4 * n < size), True) for n in range(size))
    return [Group(x[0].prompt, tuple(x), scores) for x in groups.values()]


def assembled(groups: Sequence[Group], config: Any, clock: Clock) -> StepArrays:
    """Assembles the arrays."""
    rl, ngram = config.rl, config.rl.shaping.repetition_ngram
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    clock.second("repetition_s", lambda: [repetition(x, ngram) for x in rollouts])
    return clock.second("assemble_s", lambda: assemble(groups, rl.capacity, rl.buckets[-1], ngram))


class StubPrograms:
    """The programs of `Learner.train`: stubs, but for `prepare` and `mismatch`, whose seconds and
    input bytes are counted.
    """

    def __init__(self, clock: Clock):
        self.seconds, self.taken_bytes = 0.0, 0
        self.calls, self.micro_batches = Counter[str](), 0
        names = [name for name in ("prepare", "mismatch") if hasattr(step, name)]
        self.real = {name: clock.outside(self._counted(name)) for name in names}

    def _counted(self, name: str) -> Callable[..., Any]:
        program = getattr(step, name)

        def call(*args: Any, **options: Any) -> Any:
            started = time.process_time()
            self.calls[name] += 1
            self.taken_bytes += sum(np.asarray(x).nbytes for x in jax.tree.leaves(args))
            result = jax.block_until_ready(program(*args, **options))
            self.seconds += time.process_time() - started
            return result

        return call

    @staticmethod
    @cache
    def scores(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Returns log-probs and entropies of tokens."""
        logp, entropy = np.random.default_rng(shape).random((2, *shape), np.float32)
        return jnp.asarray(-logp), jnp.asarray(entropy)

    def forward(self, model: Any, params: Any, tokens: Any, *args: Any) -> Any:
        """Stands for a forward pass."""
        self.micro_batches += 1
        return (*self.scores(tokens.shape), None, None), None

    def backward(self, *args: Any) -> Any:
        """Stands for a backward pass."""
        return {}, {"loss": (jnp.zeros(()),)}

    def patches(self) -> list[Any]:
        """Returns the patches of the module of the programs."""

        def gradients(model: Any, params: Any, batch: Any, *args: Any, **options: Any) -> Any:
            return *self.backward(), self.forward(model, params, batch.tokens)[0][0]

        def applied(state: Any, *args: Any, **options: Any) -> Any:
            return state, {}

        stubs = {"forward_and_pullback": self.forward, "backward": self.backward}
        stubs |= {"gradients": gradients, "apply": applied, **self.real}
        return [patch.object(step, name, stub) for name, stub in stubs.items()]


def trained(arrays: StepArrays, config: Any, clock: Clock) -> StubPrograms:
    """Trains on the arrays by stubs, and returns these."""
    model, settings = Transformer(config.model, config.compute), config.learner
    params = init_params(config.model, config.compute, jax.random.key(0))
    learner = Learner.start(settings, model, params)
    options: dict[str, Any] = {"rows_multiple": 1, "reads_idle": True, "fused": True}
    rows = arrays.lengths, np.zeros(len(arrays.lengths), bool), learner.updates, settings.updates
    clock.second("plan_s", lambda: row_plan(*rows, **options))

    def train() -> StubPrograms:
        programs = StubPrograms(clock)
        with ExitStack() as stack:
            for change in programs.patches():
                stack.enter_context(change)
            learner.train(arrays)
        return programs

    return clock.second("train_s", train)


def measure(prompts: int, tokens: int) -> dict[str, Any]:
    """Returns the row of a size."""
    config, clock = configured(prompts, tokens), Clock()
    arrays = assembled(grouped(sampled(config, clock)), config, clock)
    programs = trained(arrays, config, clock)
    parts = clock.parts
    host_s = sum(parts[name] for name in ("batcher_s", "assemble_s", "train_s"))
    return {
        "prompts": prompts,
        "samples": prompts * config.rl.group_size,
        "tokens": int(arrays.mask.sum()),
        "host_s": round(host_s, 3),
        **{name: round(seconds, 3) for name, seconds in parts.items()},
        "programs_s": round(programs.seconds, 3),
        "programs_gib": round(programs.taken_bytes / 2**30, 3),
        "prepare_calls": programs.calls["prepare"],
        "micro_batches": programs.micro_batches,
    }


def main(argv: list[str] | None = None) -> None:
    """Measures each size, prints its row and appends it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--out", default=ROOT / "benchmarks" / "results" / "host_step.jsonl")
    args = parser.parse_args(argv)
    for size in args.sizes:
        row = {"commit": commit(), **measure(*map(int, size.split("x")))}
        print(row, flush=True)
        append(args.out, row)


if __name__ == "__main__":
    main()
