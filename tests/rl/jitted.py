"""`prepare` as one program; called as it is, it compiles each of two hundred operations alone."""

import jax

from compass_jax.rl import prepare as module

STATIC = ("n_groups", "config", "right_at", "wrong_at", "max_new_tokens")
prepare = jax.jit(module.prepare, static_argnames=STATIC)
