"""Generation of a long-tailed mix: 1,024 requests of log-normal length (median 64, sigma 1, cut at
512) on 64 slots, against transformers.

    python -m benchmarks.long_tail [--rounds 7] [--smoke]

Ours is the rollout's collector: freed slots are filled again, the longest expected requests first;
the expected length is the true length times e^(0.5 z), z standard normal. transformers generates
static batches of 64 in the order of arrival, each until its longest request is done; tokens that a
request did not ask for do not count. `arrival_over_longest_first` compares our two orders, in
decode steps and in seconds.
"""

from __future__ import annotations

import statistics
from typing import Any

import jax
import numpy as np

from benchmarks import common
from benchmarks.rollout import CACHE_BUCKET, TransformersGenerator, calibrate
from compass_jax.base.records import Prompt, stable_id
from compass_jax.config import ComputeConfig, ModelConfig, RolloutConfig
from compass_jax.devices.allocator import tune_allocator
from compass_jax.model.flops import flops_per_token
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose
from compass_jax.weights.sync import sync_weights

MEDIAN, SIGMA, ERROR = 64, 1.0, 0.5
ORDER_ROUNDS = 3  # rounds that compare our two orders, after the others


def request_lengths(
    n: int, longest: int, median: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (new tokens of each request, their expected number)."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(np.log(median) + SIGMA * rng.standard_normal(n)), 1, longest).astype(
        np.int64
    )
    return lengths, lengths * np.exp(ERROR * rng.standard_normal(n))


class CompassGenerator:
    """compass_jax's side: one collection over all requests, each at its next visit."""

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        prompts: np.ndarray,
        lengths: np.ndarray,
        expected: np.ndarray,
        slots: int,
    ):
        most = int(lengths.max())
        self.rollout = RolloutConfig(
            slots=slots,
            prompt_buckets=(prompts.shape[1],),
            max_new_tokens=most,
            tokens_per_call=CACHE_BUCKET,
            cache_bucket=CACHE_BUCKET * 4,
        )
        self.engine = Engine(config, ComputeConfig(), self.rollout, end_ids=())
        self.params, _ = sync_weights(params, config, "float32")
        self.prompts = [
            Prompt(stable_id(f"prompt {i}"), 0, "random", "", row.astype(np.int32), "")
            for i, row in enumerate(prompts)
        ]
        self.lengths, self.expected = lengths.tolist(), expected.tolist()
        self.visit = 0
        self.stats: dict[bool, Any] = {}

    def generate(self, by_length: bool = True) -> int:
        """Generates in one of the two orders; returns the number of new tokens."""
        prompts = [prompt.at_visit(self.visit) for prompt in self.prompts]
        self.visit += 1
        collection = Collection(
            self.engine,
            self.params,
            prompts,
            1,
            Purpose.TRAIN,
            0,
            expected=self.expected if by_length else None,
            max_new_tokens=self.lengths,
        )
        new_tokens = sum(rollout.response_length for rollout in collection)
        jax.block_until_ready(collection.routes)
        self.stats[by_length] = collection.stats
        return new_tokens


def static_batches(
    generator: TransformersGenerator, prompts: np.ndarray, lengths: np.ndarray, slots: int
) -> int:
    """Generates with transformers in static batches; returns the number of tokens that the requests
    need.
    """
    import torch

    for first in range(0, len(prompts), slots):
        part = slice(first, first + slots)
        generator.prompts = torch.tensor(prompts[part])
        generator.mask = torch.ones_like(generator.prompts)
        generator(int(lengths[part].max()))
    return int(lengths.sum())


def run(rounds: int, setup: common.Setup, smoke: bool = False) -> None:
    """Measures and prints the report."""
    requests, longest, median = (12, 16, 6) if smoke else (1024, 512, MEDIAN)
    slots = setup.prompts
    model, config, params = common.build_pair(setup)
    agreement = common.compare_logits(model, config, params, setup)
    prompts = common.random_tokens(setup, (requests, setup.prompt_length), seed=3)
    lengths, expected = request_lengths(requests, longest, median)
    transformers_side = TransformersGenerator(model, prompts[:slots], setup.new_tokens)
    options, times = calibrate(transformers_side)
    compass_side = CompassGenerator(config, params, prompts, lengths, expected, slots)
    for by_length in (False, True):
        if (new_tokens := compass_side.generate(by_length)) != lengths.sum():
            raise SystemExit(
                f"ours generated {new_tokens} tokens, not {lengths.sum()}: nothing was timed"
            )
    timings = common.run_rounds(
        compass_side.generate,
        lambda: static_batches(transformers_side, prompts, lengths, slots),
        rounds,
        common.make_probe(),
    )
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for r in range(min(rounds, ORDER_ROUNDS)):
        for by_length in (False, True)[:: -1 if r % 2 else 1]:
            seconds[by_length].append(
                common.seconds(lambda by_length=by_length: compass_side.generate(by_length))
            )
    arrival, by_length = compass_side.stats[False], compass_side.stats[True]
    details = {
        "requests": requests,
        "slots": slots,
        "lengths": {
            "median": float(np.median(lengths)),
            "mean": round(float(lengths.mean()), 1),
            "longest": int(lengths.max()),
        },
        "slot_occupancy": round(by_length.metrics()["rollout/slot_occupancy"], 4),
        "slot_occupancy_arrival": round(arrival.metrics()["rollout/slot_occupancy"], 4),
        "arrival_over_longest_first": {
            "steps": round(arrival.steps / by_length.steps, 4),
            "seconds": round(
                statistics.median(seconds[False]) / statistics.median(seconds[True]), 4
            ),
        },
        "transformers_options": options,
        "transformers_calibration_s": times,
        "agreement": agreement,
        "both_sides": (
            "float32, temperature 1, untruncated distribution, no end token: a request ends at its"
            " length; prefill included"
        ),
    }
    common.report(
        "long_tail",
        smoke,
        common.summarise(timings, flops_per_token(config)),
        details,
        common.environment(),
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    if argv is None:
        tune_allocator()
    args = common.arguments("generation of a long-tailed mix against transformers", argv)
    run(args.rounds, common.SMOKE if args.smoke else common.REFERENCE, args.smoke)


if __name__ == "__main__":
    main()
