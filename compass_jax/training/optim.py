"""The optimiser with warm-up and gradient clipping, from optax. optax's transformations and
schedules need implicit dtype promotion, which is allowed only here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from compass_jax.base.aliases import Tree
from compass_jax.base.errors import CompassError
from compass_jax.base.records import TrainState
from compass_jax.config import ConfigError, OptimConfig, named
from compass_jax.model.precision import at_least_float32


class TrainingDiverged(CompassError, RuntimeError):
    """Several consecutive updates had a gradient with NaN or infinity."""


def check_divergence(bad_steps: int, limit: int, where: str) -> None:
    """Raises TrainingDiverged after `limit` consecutive skipped updates."""
    if bad_steps >= limit:
        raise TrainingDiverged(
            f"{bad_steps} updates in a row had a non-finite gradient and were skipped; the last"
            f" good weights are in {where}: lower the learning rate, or look for the first bad"
            " batch in metrics.jsonl (grad_norm)"
        )


class WithMaster(NamedTuple):
    """The optimiser's state for narrow parameters: moments and a float32 master copy, of which the
    model has the rounded values.

    An update of a relative size below 2^-9 leaves a bfloat16 parameter unchanged; the master
    accumulates such updates.
    """

    moments: Tree
    master: Tree


def widen(tree: Tree) -> Tree:
    """Casts all leaves to at least float32."""
    return jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), tree)


def learning_rate(config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Returns the schedule: linear warm-up over `warmup_steps` updates (the first has a rate above
    0), then constant, or cosine decay to 0 at `total_steps` updates. A decay by tokens is a factor
    of its own (training/hooks/rates.py).
    """
    after = max(total_steps - config.warmup_steps, 1)
    peak = config.learning_rate
    main = (
        optax.constant_schedule(peak)
        if config.schedule == "constant" or config.schedule_tokens
        else optax.cosine_decay_schedule(peak, after)
    )
    if not config.warmup_steps:
        return main
    # Update n, from 1, has n / (warmup_steps + 1) of the peak.
    first = config.learning_rate / (config.warmup_steps + 1)
    return optax.join_schedules(
        [optax.linear_schedule(first, config.learning_rate, config.warmup_steps), main],
        [config.warmup_steps],
    )


def rates(config: OptimConfig, total_steps: int, updates: Sequence[int]) -> np.ndarray:
    """Returns the learning rates of updates, counted from 0, of a run of `total_steps` updates."""
    with jax.numpy_dtype_promotion("standard"):
        values = learning_rate(config, total_steps)(jnp.asarray(list(updates)))
    return np.broadcast_to(np.asarray(values, np.float64), len(updates))


def make_optimizer(
    config: OptimConfig,
    total_steps: int,
    decays: tuple[bool, ...] | None = None,
    betas: tuple[jax.Array, jax.Array] | None = None,
    key: str = "rl.optim",
) -> optax.GradientTransformation:
    """Returns AdamW, or the transformation that `config.name` names.

    A named function with a parameter `mask` gets the leaves that take weight decay, as AdamW does.

    Args:
        config: the optimiser's settings.
        total_steps: updates of the whole run, for the learning rate's schedule.
        decays: which leaves take weight decay, in the tree's order (params.decays); None: the
            initial state does not depend on them.
        betas: AdamW's b1 and b2; None: those of `config`.
        key: the setting that holds `config`, for messages.

    Raises:
        ConfigError: the named function does not take its options, or returns something else.
    """

    def mask(params):
        leaves, structure = jax.tree.flatten(params)
        return jax.tree.unflatten(structure, decays or (True,) * len(leaves))

    if config.name != "adamw":
        if betas is not None:
            raise ConfigError(
                f"{key}.name = {config.name!r}: other betas in a run are for adamw; leave them out"
            )
        return _named_optimizer(config, learning_rate(config, total_steps), mask, f"{key}.name")
    b1, b2 = (config.b1, config.b2) if betas is None else betas
    return optax.adamw(
        learning_rate(config, total_steps),
        b1=b1,
        b2=b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=mask,
    )


def check_optimizer(config: OptimConfig, total_steps: int, key: str) -> None:
    """Raises ConfigError for an optimiser that cannot be made; the arguments are those of
    `make_optimizer`. A run calls it before it reads weights.
    """
    with jax.numpy_dtype_promotion("standard"):
        make_optimizer(config, total_steps, key=key)


def _named_optimizer(
    config: OptimConfig, schedule: optax.Schedule, mask: Tree, key: str
) -> optax.GradientTransformation:
    function = named.load(config.name, key)
    options = dict(config.options)
    try:
        if "mask" in inspect.signature(function).parameters:
            options.setdefault("mask", mask)
        transformation = function(learning_rate=schedule, **options)
    except Exception as error:
        raise ConfigError(
            f"{key} = {config.name!r} cannot be called with learning_rate and"
            f" {dict(config.options)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(transformation, optax.GradientTransformation):
        raise ConfigError(
            f"{key} = {config.name!r} returns {type(transformation).__name__}, not an"
            " optax.GradientTransformation"
        )
    return transformation


def init_state(params: Tree, config: OptimConfig, total_steps: int) -> TrainState:
    """Returns the train state before the first update. The parameters are copied, because updates
    donate the state.
    """
    zero = jnp.zeros((), jnp.int32)
    master = widen(params) if config.float32_master and _is_narrow(params) else None
    with jax.numpy_dtype_promotion("standard"):
        opt_state = make_optimizer(config, total_steps).init(params if master is None else master)
    opt_state = opt_state if master is None else WithMaster(opt_state, master)
    average = None
    if config.average:
        average = jax.tree.map(jnp.copy, widen(params) if master is None else master)
    # Three separate arrays, because a buffer cannot be donated twice.
    counts = zero, zero + 0, zero + 0
    return TrainState(jax.tree.map(jnp.copy, params), opt_state, *counts, average)


def _is_narrow(params: object) -> bool:
    return any(x.dtype != at_least_float32(x.dtype) for x in jax.tree.leaves(params))


def global_norm(tree: Tree) -> jax.Array:
    """Computes the square root of the sum of squares of all leaves, in at least float32."""
    leaves = jax.tree.leaves(widen(tree))
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in leaves))


def average_weights(average: Tree, params: Tree, updates: jax.Array, limit: float) -> Tree:
    """Computes the exponential moving average of the parameters after an update:

        average <- d average + (1 - d) params        d = min(limit, (1 + t) / (10 + t))

    t is `updates`, the number of applied updates, this one included. The smaller d of the first
    updates forgets the parameters before them (as in TensorFlow's ExponentialMovingAverage).
    """

    def averaged(mean, x):
        t = updates.astype(mean.dtype)
        decay = jnp.minimum(limit, (1 + t) / (10 + t))
        return mean + (1 - decay) * (x.astype(mean.dtype) - mean)

    return jax.tree.map(averaged, average, params)


def update(
    state: TrainState,
    grads: Tree,
    config: OptimConfig,
    total_steps: int,
    decays: tuple[bool, ...],
    factor: jax.Array | None = None,
    betas: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Runs one update with the gradient clipped to `clip_grad_norm`. A gradient with NaN or
    infinity changes only the counters. One that is 0 everywhere changes only the place in the
    learning-rate schedule: neither momentum nor weight decay moves the parameters, and it does not
    count as applied. `factor` multiplies the change of the parameters, and so AdamW's learning rate
    (None: 1); `betas` are AdamW's in this update (None: those of `config`).
    """
    # One test for all leaves: a NaN or an infinity in any of them is in the norm, too.
    norm = global_norm(grads)
    finite = jnp.isfinite(norm)
    moves = finite & (norm > 0)
    scale = jnp.where(
        finite, jnp.minimum(1.0, config.clip_grad_norm / jnp.maximum(norm, 1e-12)), 0.0
    )
    has_master = isinstance(state.opt_state, WithMaster)
    # With a master copy the update is that of the master; the model gets its rounded values below.
    moments, params = state.opt_state if has_master else (state.opt_state, state.params)
    # The gradient was summed in at least float32; the optimiser computes in the type of `params`.
    grads = jax.tree.map(
        lambda g, p: jnp.where(finite, g * scale.astype(g.dtype), jnp.zeros((), g.dtype)).astype(
            p.dtype
        ),
        grads,
        params,
    )
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = make_optimizer(config, total_steps, decays, betas).update(
            grads, moments, params
        )
        place = _schedule_place(moments, state.step)
        lr = jnp.asarray(learning_rate(config, total_steps)(place), jnp.float32)
        if factor is not None:
            updates = jax.tree.map(lambda x: x * factor.astype(x.dtype), updates)
            lr = lr * factor
        params = optax.apply_updates(params, updates)
    average = state.average
    if average is not None:
        average = average_weights(average, params, state.step + 1, config.average)

    def keep(changes, new, old):
        return jax.tree.map(lambda a, b: jnp.where(changes, a, b), new, old)

    def keep_state(new, old):
        return keep(finite if _is_schedule(new) else moves, new, old)

    if has_master:
        opt_state = WithMaster(opt_state, params)
        params = jax.tree.map(lambda new, old: new.astype(old.dtype), params, state.params)
    bad = (~finite).astype(jnp.int32)
    state = TrainState(
        keep(moves, params, state.params),
        jax.tree.map(keep_state, opt_state, state.opt_state, is_leaf=_is_schedule),
        state.step + moves.astype(jnp.int32),
        (state.bad_steps + 1) * bad,
        state.skipped + bad,
        keep(moves, average, state.average),
    )
    return state, {"grad_norm": norm, "lr": lr, "zero_gradient_updates": finite & (norm == 0)}


def _is_schedule(state: object) -> bool:
    """Returns whether a part of an optimiser's state is the place in the schedule."""
    return isinstance(state, optax.ScaleByScheduleState)


def _schedule_place(state: object, updates: jax.Array) -> jax.Array:
    """Returns the number of updates that the schedule has counted in an optimiser's state: the
    applied ones and those with a gradient of 0. An optimiser that keeps no such number counts the
    applied ones, `updates`.
    """
    parts = jax.tree.leaves(state, is_leaf=_is_schedule)
    return next((part.count for part in parts if _is_schedule(part)), updates)
