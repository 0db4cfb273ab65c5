"""Generation: a batch of prompts sampled at temperature 1, prefill included, against transformers'
`generate`.

    python -m benchmarks.rollout [--rounds 9] [--smoke]

Ours is the rollout as the RL loop runs it: the collector over the engine, which also returns
log-probs, entropies and the routing of every token. transformers returns the tokens alone. No
sequence ends early on either side. The warm-up (compilation on our side) is not timed in the
rounds; `ours_compile_s` reports it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import torch

from benchmarks import common
from compass_jax.base.records import Prompt, stable_id
from compass_jax.config import ComputeConfig, ModelConfig, RolloutConfig
from compass_jax.devices.allocator import tune_allocator
from compass_jax.model.flops import flops_per_token
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose
from compass_jax.weights.sync import sync_weights

CACHE_BUCKET = 16


class CompassGenerator:
    """compass_jax's side: one `Collection` per call, each prompt at its next visit, so that no call
    repeats another's samples.
    """

    def __init__(self, config: ModelConfig, params: Any, prompts: np.ndarray, setup: common.Setup):
        self.rollout = RolloutConfig(
            slots=setup.prompts,
            prompt_buckets=(setup.prompt_length,),
            max_new_tokens=setup.new_tokens,
            tokens_per_call=setup.tokens_per_call,
            cache_bucket=CACHE_BUCKET,
            temperature=1.0,
        )
        self.engine = Engine(config, ComputeConfig(), self.rollout, end_ids=())
        self.params, _ = sync_weights(params, config, "float32")
        self.prompts = [
            Prompt(stable_id(f"prompt {i}"), 0, "random", "", row.astype(np.int32), "")
            for i, row in enumerate(prompts)
        ]
        self.visit = 0

    def generate(self) -> list[Any]:
        """Returns the finished rollouts; their routing is in the collection's store by then."""
        prompts = [prompt.at_visit(self.visit) for prompt in self.prompts]
        self.visit += 1
        collection = Collection(
            self.engine,
            self.params,
            prompts,
            samples=1,
            purpose=Purpose.TRAIN,
            seed=0,
            keep_routes=True,
        )
        rollouts = list(collection)
        jax.block_until_ready(collection.routes)
        return rollouts

    def __call__(self) -> int:
        """Generates; returns the number of new tokens."""
        return sum(rollout.response_length for rollout in self.generate())


class TransformersGenerator:
    """transformers' side: `generate`, sampling from the whole distribution as ours does (its
    default top_k of 50 is off).
    """

    def __init__(self, model: Any, prompts: np.ndarray, new_tokens: int):
        self.model, self.new_tokens = model, new_tokens
        self.prompts = torch.tensor(prompts)
        self.mask = torch.ones_like(self.prompts)
        self.cache: str | None = None

    def choose(self, experts: str, attention: str, cache: str) -> None:
        """Switches the implementations."""
        self.model.set_experts_implementation(experts)
        self.model.set_attn_implementation(attention)
        self.cache = None if cache == "dynamic" else cache

    def generate_with(self, new_tokens: int, **options: str) -> int:
        """Generates `new_tokens` with other implementations."""
        self.choose(**options)
        return self(new_tokens)

    @torch.inference_mode()
    def __call__(self, new_tokens: int | None = None) -> int:
        """Generates `new_tokens` tokens, by default as many as the constructor names; returns the
        number of new tokens.
        """
        out = self.model.generate(
            self.prompts,
            attention_mask=self.mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens or self.new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
            cache_implementation=self.cache,
        )
        return out.numel() - self.prompts.numel()


def calibrate(transformers_side: TransformersGenerator) -> tuple[dict[str, str], dict[str, float]]:
    """Returns the fastest of transformers' options here, chosen one after the other, and the
    seconds of a generation with each. The fastest options stay switched on.

    The cache is chosen on whole generations, since its cost grows with their length; the other
    options are chosen on an eighth.
    """
    best = {"experts": "grouped_mm", "attention": "sdpa", "cache": "dynamic"}
    times = {}
    values = {
        "experts": ("grouped_mm", "eager", "batched_mm"),
        "attention": ("sdpa", "eager"),
        "cache": ("dynamic", "static"),
    }
    for option, choices in values.items():
        length = (
            transformers_side.new_tokens
            if option == "cache"
            else max(2, transformers_side.new_tokens // 8)
        )
        candidates = {
            value: partial(transformers_side.generate_with, length, **{**best, option: value})
            for value in choices
        }
        best[option], timings = common.fastest(option, candidates, repeats=2)
        times |= {f"{option}={value}": round(t, 3) for value, t in timings.items()}
    transformers_side.choose(**best)
    return best, times


def check_counts(
    compass_side: CompassGenerator, transformers_side: TransformersGenerator, expected: int
) -> None:
    """Raises SystemExit unless both sides make all tokens: a sequence that ended early would save
    time.
    """
    for name, count in (("ours", compass_side()), ("transformers", transformers_side())):
        if count != expected:
            raise SystemExit(f"{name} generated {count} tokens, not {expected}: nothing was timed")


def run(rounds: int, setup: common.Setup, smoke: bool = False) -> None:
    """Measures and prints the report."""
    model, config, params = common.build_pair(setup)
    agreement = common.compare_logits(model, config, params, setup)
    prompts = common.random_tokens(setup, (setup.prompts, setup.prompt_length), seed=3)
    transformers_side = TransformersGenerator(model, prompts, setup.new_tokens)
    options, times = calibrate(transformers_side)
    compass_side = CompassGenerator(config, params, prompts, setup)
    first = common.seconds(compass_side)
    check_counts(compass_side, transformers_side, setup.prompts * setup.new_tokens)
    second = common.seconds(compass_side)
    timings = common.run_rounds(compass_side, transformers_side, rounds, common.make_probe())
    details = {
        "ours_compile_s": round(first - second, 2),
        "warm_up": "excluded from the rounds",
        "ours_returns": "tokens, log-probs, entropies, routing; transformers: tokens",
        "transformers_options": options,
        "transformers_calibration_s": times,
        "agreement": agreement,
        "parameters": sum(p.numel() for p in model.parameters()),
        "prompts": [setup.prompts, setup.prompt_length],
        "new_tokens": setup.new_tokens,
        "both_sides": (
            "float32, temperature 1, untruncated distribution, no end token, prefill included"
        ),
    }
    common.report(
        "rollout",
        smoke,
        common.summarise(timings, flops_per_token(config)),
        details,
        common.environment(),
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    if argv is None:
        tune_allocator()
    args = common.arguments("generation against transformers", argv)
    run(args.rounds, common.SMOKE if args.smoke else common.REFERENCE, args.smoke)


if __name__ == "__main__":
    main()
