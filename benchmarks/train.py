"""Training: one full step of AdamW (forward, cross-entropy over all tokens, backward, clipping,
update), against transformers.

    python -m benchmarks.train [--rounds 9] [--smoke]

Both sides start from the same weights, see the same batches in the same order and make the same
updates; the router's load-balancing loss is off. Before timing, the logits and the losses of the
first steps are compared. The warm-up (compilation on our side) is not timed in the rounds;
`ours_compile_s` reports it.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import common
from compass_jax.config import ComputeConfig, ModelConfig, OptimConfig
from compass_jax.devices.allocator import tune_allocator
from compass_jax.model.flops import flops_per_token
from compass_jax.model.params import decays, in_layout, training_layout
from compass_jax.model.transformer import Transformer
from compass_jax.training import optim, step

OPTIM = OptimConfig(learning_rate=1e-4, weight_decay=0.0, clip_grad_norm=1.0)
TOTAL_STEPS = 10_000  # steps of the schedule, which is constant
CHECKED_STEPS = 3
LOSS_ATOL = 1e-3


class CompassTrainer:
    """compass_jax's side, as the SFT trainer runs it: `sft_gradients`, then `apply`."""

    def __init__(self, config: ModelConfig, params: Any, batches: np.ndarray):
        compute = ComputeConfig(scan_layers=False)
        self.model = Transformer(config, compute, training_layout(compute))
        self.state = optim.init_state(in_layout(params, self.model.layout), OPTIM, TOTAL_STEPS)
        _, rows, length = batches.shape
        self.batches = itertools.cycle(jnp.asarray(batches, jnp.int32))
        self.lengths = jnp.full((rows,), length, jnp.int32)
        weight = np.full((rows, length), 1.0 / (rows * (length - 1)), np.float32)
        weight[:, 0] = 0.0  # the first token is not predicted
        self.weight = jnp.asarray(weight)
        self.load = 0.0  # of the fullest expert over the mean, in the last step

    def step(self) -> float:
        """Makes one update; returns the loss before it."""
        grads, metrics = step.sft_gradients(
            self.model,
            self.state.params,
            next(self.batches),
            self.lengths,
            self.weight,
            jnp.float32(1.0),
            0.0,
        )
        self.state, applied = step.apply(
            self.state,
            grads,
            config=OPTIM,
            total_steps=TOTAL_STEPS,
            decays=decays(self.model.config, self.model.layout),
        )
        jax.block_until_ready((self.state, applied))
        load, tokens = metrics["moe/load_max_over_mean"]
        self.load = float(load) / float(tokens)
        return float(metrics["loss"][0])


class TransformersTrainer:
    """The side of transformers: a model with its loss, and torch's AdamW."""

    def __init__(self, model: Any, batches: np.ndarray, experts: str, attention: str, adamw: str):
        self.model = copy.deepcopy(model).train()
        self.model.set_experts_implementation(experts)
        self.model.set_attn_implementation(attention)
        self.batches = itertools.cycle(torch.tensor(batches))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=OPTIM.learning_rate,
            betas=(OPTIM.b1, OPTIM.b2),
            eps=OPTIM.eps,
            weight_decay=OPTIM.weight_decay,
            **{adamw: True},
        )

    def step(self) -> float:
        """Makes one update; returns the loss before it."""
        tokens = next(self.batches)
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, OPTIM.clip_grad_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def calibrate(model: Any, batches: np.ndarray) -> tuple[dict[str, str], dict[str, float]]:
    """Returns the fastest of transformers' options here, chosen one after the other, and the
    seconds of a step with each.

    `batched_mm` is not among them: it copies the expert's weights for every token and choice, 6 GiB
    a layer at the reference size, and keeps them for the backward pass.
    """
    best = {"experts": "grouped_mm", "attention": "sdpa", "adamw": "fused"}
    times = {}
    for option, values in {
        "experts": ("grouped_mm", "eager"),
        "attention": ("sdpa", "eager"),
        "adamw": ("fused", "foreach"),
    }.items():
        candidates = {
            value: TransformersTrainer(model, batches, **{**best, option: value}).step
            for value in values
        }
        best[option], timings = common.fastest(option, candidates)
        times |= {f"{option}={value}": round(t, 4) for value, t in timings.items()}
    return best, times


def compare_losses(
    compass_side: CompassTrainer, transformers_side: TransformersTrainer
) -> tuple[dict[str, float], float]:
    """Returns the largest difference of the losses of the first steps, after which both sides
    continue, and the seconds of our first step.
    """
    our_losses: list[float] = []
    first = common.seconds(lambda: our_losses.append(compass_side.step()))
    our_losses += [compass_side.step() for _ in range(CHECKED_STEPS - 1)]
    difference = max(abs(loss - transformers_side.step()) for loss in our_losses)
    if not difference <= LOSS_ATOL:
        raise SystemExit(
            f"losses of the first {CHECKED_STEPS} steps differ by {difference:.1e}, above"
            f" {LOSS_ATOL:.0e}: nothing was timed"
        )
    return {
        "loss_max_abs_diff": difference,
        "loss_atol": LOSS_ATOL,
        "loss_steps": CHECKED_STEPS,
    }, first


def run(rounds: int, setup: common.Setup, smoke: bool = False) -> None:
    """Measures and prints the report."""
    model, config, params = common.build_pair(setup)
    agreement = common.compare_logits(model, config, params, setup)
    batches = common.random_tokens(setup, (8, setup.train_rows, setup.train_length), seed=2)
    options, times = calibrate(model, batches)
    compass_side, transformers_side = (
        CompassTrainer(config, params, batches),
        TransformersTrainer(model, batches, **options),
    )
    losses, first = compare_losses(compass_side, transformers_side)
    tokens = setup.steps * setup.train_rows * setup.train_length
    second = min(common.seconds(compass_side.step) for _ in range(2))
    for _ in range(2):
        transformers_side.step()  # both have made the same updates when the rounds start

    def several(side: CompassTrainer | TransformersTrainer) -> int:
        for _ in range(setup.steps):
            side.step()
        return tokens

    load = compass_side.load
    timings = common.run_rounds(
        lambda: several(compass_side),
        lambda: several(transformers_side),
        rounds,
        common.make_probe(),
    )
    details = {
        "ours_compile_s": round(first - second, 2),
        "warm_up": "excluded from the rounds",
        "transformers_options": options,
        "transformers_calibration_s": times,
        "agreement": {**agreement, **losses},
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": [setup.train_rows, setup.train_length],
        "steps_per_round": setup.steps,
        # before the first and after the last round
        "moe_load_max_over_mean": [round(load, 2), round(compass_side.load, 2)],
        "both_sides": (
            f"float32, full AdamW step, gradient clipping at {OPTIM.clip_grad_norm}, no router"
            " loss, no weight decay"
        ),
    }
    common.report(
        "train",
        smoke,
        common.summarise(timings, 3 * flops_per_token(config)),
        details,
        common.environment(),
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    if argv is None:
        tune_allocator()
    args = common.arguments("training step against transformers", argv)
    run(args.rounds, common.SMOKE if args.smoke else common.REFERENCE, args.smoke)


if __name__ == "__main__":
    main()
