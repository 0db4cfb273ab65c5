"""Notices on the learning rate: a schedule that another number of steps moves, and weights that
hardly move.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from compass_jax.base.aliases import Tree
from compass_jax.config import OptimConfig, SFTConfig, UpdatesConfig
from compass_jax.config.lora import LoRAConfig
from compass_jax.training.optim import rates

Stage = UpdatesConfig | SFTConfig
# Largest change of a weight in a run, as a share of the weights' root mean square, for a notice.
# 20 updates of a model of 0.6B with a rate of 1e-6, which teach too little (docs/quickstart.md),
# reach 0.0005; 100 updates of a model of 7B with it 0.005.
HARDLY = 0.002
SIGNED = ("adamw", "optax:adam", "optax:adamw", "optax:lion")  # an update is about the rate


def moved_schedule(before: Stage | None, now: Stage, done_steps: int) -> str:
    """Returns a notice where another number of steps moves the learning rates of a resumed run;
    empty where they stay.

    Args:
        before, now: the settings of RL or SFT of the run so far (None: it is new), and the present
            ones.
        done_steps: steps of the run so far.
    """
    if before is None or not done_steps or before.steps == now.steps:
        return ""
    if now.optim.schedule == "constant" or now.optim.schedule_tokens:
        return ""
    key, last, following = now.KEY, done_steps, done_steps + 1
    return (
        f"{key}.steps = {now.steps}, {before.steps} before: {key}.optim.schedule ="
        f" {now.optim.schedule!r} ends with the run, so that its rates move: step {last} had"
        f" {_rate(before, last)}, and has {_rate(now, last)} in a run of {now.steps} steps; step"
        f" {following} has {_rate(now, following)}, and {_rate(before, following)} in a run of"
        f" {before.steps}. Set {key}.steps to {before.steps}, or train in another run_dir for the"
        " rates of one run"
    )


def _rate(stage: Stage, step: int) -> str:
    """Returns the learning rate of the first update of a step."""
    total = stage.steps if isinstance(stage, SFTConfig) else stage.total_updates
    update = min(step - 1, stage.steps) * total // stage.steps
    return f"{rates(stage.optim, total, [update])[0]:.3g}"


def hardly_moves(
    optim: OptimConfig,
    updates: int,
    trained: Tree,
    lora: LoRAConfig,
    frozen: Tree | None,
) -> str:
    """Returns a notice where all updates of a run together can change a weight by less than HARDLY
    of the weights' root mean square; empty otherwise.

    An update of Adam moves a weight by about the learning rate, so that the sum of all rates bounds
    the change. Adapters A B, of which B begins at 0, change a weight by at most the sum times
    sqrt(rank) times the root mean square of A times their scale. `trained` has the weights or the
    adapters before the first update, and `frozen` the adapters' base.
    """
    if optim.name not in SIGNED:
        return ""
    reach = float(rates(optim, updates, range(updates)).sum())
    size = _root_mean_square(trained)
    if frozen is not None:
        reach *= math.sqrt(lora.rank) * size * lora.scale
        size = _root_mean_square(frozen)
    if not size or reach >= HARDLY * size:
        return ""
    return (
        f"rl.optim.learning_rate = {optim.learning_rate:g}: {updates} updates change a weight by"
        f" {reach:.1g} at most, {reach / size:.2%} of the weights' root mean square, {size:.2g}, so"
        f" that the policy hardly changes; raise it (docs/howto/presets.md has rates by size), or"
        " rl.steps"
    )


def _root_mean_square(tree: Tree) -> float:
    """Returns the root mean square of the matrices of a tree, without those that are 0."""
    total, count = 0.0, 0
    for leaf in jax.tree.leaves(tree):
        square = float(jnp.sum(jnp.square(leaf.astype(jnp.float32)))) if leaf.ndim > 1 else 0.0
        total, count = total + square, count + leaf.size * (square > 0)
    return math.sqrt(total / count) if count else 0.0
