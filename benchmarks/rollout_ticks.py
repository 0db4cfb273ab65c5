"""Token steps of a rollout whose groups grow or are screened, in rounds and within one rollout.

    python -m benchmarks.rollout_ticks [--seeds 10]
                                       [--results benchmarks/results/rollout_ticks.jsonl]

Collector, step policies and decisions are those of a run; engine, verdicts and routes are
simulated. 64 groups of 16 samples in 1,024 slots; answers of 8,100 tokens in the mean (log-normal;
the longest of 1,024 has about 30,720, where answers are cut); a decode call has 128 token steps.
Half of the groups have equal rewards. A pod decodes all slots at once, so that a rollout costs its
token steps, however few samples run.

One row a setting: the token steps, in times those of a plain rollout with the same seed; the mean,
the least and the most over the seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.experiments import append, commit
from compass_jax.base.records import Prompt, Rollout, SampleKey, Score
from compass_jax.config import RewardConfig, RLConfig, ZeroVarianceConfig, named_correction
from compass_jax.experience.admission import OpenCollector
from compass_jax.experience.buffer import ExperienceBuffer
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.experience.turns import Turns
from compass_jax.rollout.routes import RouteBuffer

RESULTS = Path(__file__).resolve().parent / "results" / "rollout_ticks.jsonl"
GROUPS, GROUP, SLOTS = 64, 16, 1024
MEAN, SIGMA, LONGEST, CALL = 8_100, 0.465, 30_720, 128  # tokens; SIGMA is of their logarithms
STEPS = 6  # of which the last five count: partial rollouts need one to fill
PLAIN = RLConfig(
    prompts_per_step=GROUPS,
    group_size=GROUP,
    step_policy=None,
    zero_variance=ZeroVarianceConfig(),
    verdict_ticks=None,
)
SETTINGS = {
    "plain": PLAIN,
    "growth to 32": dataclasses.replace(PLAIN, zero_variance=ZeroVarianceConfig(grow_to=32)),
    "screening 4 of 16": dataclasses.replace(PLAIN, step_policy=Screening(n0=4, min_chance=1.0)),
    "partial, 32 more prompts": dataclasses.replace(
        PLAIN, partial_prompts=32, correction=named_correction("tis")
    ),
}


class Fake:
    """An engine and a verifier: a sample's key determines its length and its verdict."""

    slow, workers_only = False, True

    def __init__(self, config: RLConfig, seed: int):
        self.config, self.seed, self.drawn = config, seed, 0
        self.calls: list[int] = []  # of each step
        self._verdicts: list[tuple[SampleKey, Score]] = []
        self._lengths: dict[SampleKey, int] = {}

    def length(self, key: SampleKey) -> int:
        """Returns the tokens of a sample's answer."""
        if key not in self._lengths:
            rng = np.random.default_rng([self.seed, *key])
            drawn = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA)
            self._lengths[key] = int(np.clip(drawn, 1, LONGEST))
        return self._lengths[key]

    def draw(self, n: int) -> list[Prompt]:
        """Returns the next n prompts, of which every other one has equal rewards."""
        self.drawn += n
        return [Prompt.of_tokens([1], i) for i in range(self.drawn - n, self.drawn)]

    def submit(self, key: SampleKey, prompt: Prompt, response: Any) -> None:
        """Judges a sample: odd prompts have right and wrong answers in turn."""
        reward = float(key.index % 2) if key.prompt % 2 else 0.0
        self._verdicts.append((key, Score(reward, True)))

    def collect(self, block: bool) -> list[tuple[SampleKey, Score]]:
        """Returns the verdicts."""
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def batch(self, engine: Any, params: Any, prompts: Sequence[Prompt], *_: Any, **options: Any):
        """Returns a collection."""
        return Calls(self, prompts, SimpleNamespace(**{"admit": lambda done: (), **options}))


class Calls:
    """A collection that counts calls of decode."""

    def __init__(self, fake: Fake, prompts: Sequence[Prompt], options: SimpleNamespace):
        self.fake, self.options = fake, options
        self.prompts = {prompt.key: prompt for prompt in prompts}
        self.left: dict[SampleKey, int] = {}
        carried = {x.key: x.response_length for x in options.carried}
        for key in sorted(options.sample_keys):
            self.left[key] = fake.length(key) - carried.get(key, 0)

    def __iter__(self) -> Iterator[Rollout]:
        while self.left and not self.options.enough():
            self.fake.calls[-1] += 1
            running = list(self.left)[:SLOTS]
            for key in running:
                self.left[key] -= CALL
            done = [self._rollout(key) for key in running if self.left[key] <= 0]
            for rollout in done:
                del self.left[rollout.key]
            yield from done
            for key in self.options.admit(done):
                self.left[key] = self.fake.length(key)

    def _rollout(self, key: SampleKey) -> Rollout:
        tokens = np.zeros(1 + self.fake.length(key) - max(self.left[key], 0), np.int32)
        values = np.zeros(len(tokens), np.float32)
        prompt = self.prompts[key[:2]]
        return Rollout(prompt, key.index, tokens, values, values, False, tokens, 0)

    def abort(self) -> list[Rollout]:
        """Returns the unfinished samples that have tokens."""
        begun = [key for key, left in self.left.items() if left < self.fake.length(key)]
        return [self._rollout(key) for key in begun]


def token_steps(config: RLConfig, seed: int) -> float:
    """Returns the mean token steps of a rollout."""
    fake = Fake(config, seed)
    rows = (lambda n: jnp.zeros((n, 1, 1, 1), jnp.uint8), lambda store, index: store)
    buffer = ExperienceBuffer(RouteBuffer(*rows, config.routed_groups, config.capacity))
    turns = Turns(lambda tokens: "", lambda says, turn: [], 2 * LONGEST)
    nan = float("nan")
    collect = OpenCollector(
        fake, fake, turns, lambda prompt: nan, config, RewardConfig(), 0, batcher=fake.batch
    )
    for step in range(STEPS):
        fake.calls.append(0)
        collect(buffer, None, step, fake.draw, False, lambda: False)
        buffer.end_step()
    return CALL * statistics.fmean(fake.calls[1:])


def main(argv: list[str] | None = None) -> None:
    """Appends a row for each setting, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="their number")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    plain = [token_steps(PLAIN, seed) for seed in range(options.seeds)]
    for name, config in SETTINGS.items():
        for ticks in (None, 0, 1) if name != "plain" else (None,):
            changed = dataclasses.replace(config, verdict_ticks=ticks)
            steps = [token_steps(changed, seed) for seed in range(options.seeds)]
            times = [x / y for x, y in zip(steps, plain, strict=True)]
            row = {"setting": name, "verdict_ticks": ticks, "seeds": options.seeds}
            row |= {"token_steps": round(statistics.fmean(steps))}
            row |= {"times": round(statistics.fmean(times), 3)}
            row |= {"least": round(min(times), 3), "most": round(max(times), 3)}
            append(options.results, {**row, "commit": commit()})
            print(row, flush=True)


if __name__ == "__main__":
    main()
