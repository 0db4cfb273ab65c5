"""A jitted `prepare`, called with the arrays of a test case. Without jit each of its two hundred
operations would be compiled separately.
"""

import jax
import jax.numpy as jnp

from compass_jax.base.records import EARLIER, GOLD, SAMPLED
from compass_jax.rl import prepare as module
from compass_jax.rl.diagnostics import finalize_diagnostics
from compass_jax.rl.policy import policy_objective
from compass_jax.rl.prepare import RewardScale, UpdateRows

prepare = jax.jit(module.prepare, static_argnames=("n_groups", "config", "scale"))
COLUMNS = (GOLD, EARLIER, SAMPLED)


def prepare_rows(mask, entropy, reward, known, group, config, dtype=jnp.float32, **options):
    """Returns the prepared rows and their metrics as numbers; an entropy of None is 1 nat."""
    columns = {name: jnp.asarray(options.pop(name)) for name in COLUMNS if name in options}
    n_groups = options.pop("n_groups", int(max(group)) + 1)
    scale = {"right_at": 1.0, "wrong_at": 0.0, "max_new_tokens": 16}
    scale = RewardScale(**{name: options.pop(name, value) for name, value in scale.items()})
    rows = UpdateRows(
        jnp.asarray(mask),
        jnp.asarray(reward, dtype),
        jnp.asarray(known),
        jnp.asarray(group, jnp.int32),
        jnp.ones(mask.shape, dtype) if entropy is None else jnp.asarray(entropy, dtype),
        columns={k: x.astype(dtype) if k == GOLD else x for k, x in columns.items()},
        **{name: jnp.asarray(x, dtype) for name, x in options.items()},
    )
    prepared, diagnostics = prepare(rows, n_groups=n_groups, config=config, scale=scale)
    return prepared, numbers(diagnostics)


def prepare_toy(toy, config, dtype=jnp.float64, **options):
    """Returns the prepared rows of a toy policy's rollout and their metrics as numbers."""
    arrays = {"entropy": toy.old_entropy, "n_groups": toy.n_groups, **options}
    return prepare_rows(
        toy.mask, arrays.pop("entropy"), toy.reward, toy.known, toy.group, config, dtype, **arrays
    )


def objective_of(logp, old_logp, entropy, p, config, vocab_size, ref_logp=None, **changes):
    """Returns the objective of each token, and its diagnostics, for prepared rows."""
    fields = ("advantage", "weight", "mask", "entropy_group", "kl_weight")
    arrays = {name: getattr(p, name) for name in fields} | changes
    advantage, weight = arrays.pop("advantage"), arrays.pop("weight")
    options = {"ref_logp": ref_logp, "vocab_size": vocab_size}
    return policy_objective(logp, old_logp, entropy, advantage, weight, config, **arrays, **options)


def numbers(diagnostics):
    """Returns the finalized diagnostics as floats."""
    return {name: float(value) for name, value in finalize_diagnostics(diagnostics).items()}
