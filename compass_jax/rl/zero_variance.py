"""Zero-variance groups: their kinds, their entropy advantage (RL-ZVP), and the account of the
rollout's tokens by training signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.base.masked import masked_max
from compass_jax.base.records import Outcome
from compass_jax.rl.diagnostics import Diagnostics, share_of
from compass_jax.rl.grouping import group_statistics
from compass_jax.rl.shapes import require_shape

# the parts of waste/, which sum to 1
SIGNALS = ("verifier_signal", "shaping_signal", "entropy_signal", "prediction_signal", "none")


class GroupKind(IntEnum):
    """A group's kind by its known raw rewards."""

    UNDECIDED = 0  # fewer than two known rewards
    VARIED = 1
    ALL_RIGHT = 2
    ALL_WRONG = 3
    UNIFORM_BETWEEN = 4  # uniform, neither right nor wrong: all Tie, all half of the tests


def group_kind(
    reward: Float[Array, "b"],
    known: Bool[Array, "b"],
    group: Int[Array, "b"],
    n_groups: int,
    *,
    right_at: float,
    wrong_at: float,
) -> Int[Array, "g"]:
    """Returns the `GroupKind` of each group, from raw rewards: a penalty in shaped ones would hide
    a uniform group.

    Uniform: max - min <= 1e-6. All right: uniform and every reward >= `right_at`; all wrong:
    uniform and every reward <= `wrong_at`.
    """
    if not wrong_at < right_at:
        raise ValueError(f"group_kind: wrong_at = {wrong_at} must be below right_at = {right_at}")
    stats = group_statistics(reward, known, group, n_groups)
    kind = jnp.full((n_groups,), GroupKind.VARIED, jnp.int32)
    kind = jnp.where(stats.uniform, int(GroupKind.UNIFORM_BETWEEN), kind)
    kind = jnp.where(stats.uniform & (stats.low >= right_at), int(GroupKind.ALL_RIGHT), kind)
    kind = jnp.where(stats.uniform & (stats.high <= wrong_at), int(GroupKind.ALL_WRONG), kind)
    return jnp.where(stats.decided, kind, int(GroupKind.UNDECIDED))


def rl_zvp_advantage(
    old_entropy: Float[Array, "b t"], mask: Bool[Array, "b t"], kind: Int[Array, "b"], alpha: float
) -> Float[Array, "b t"]:
    """Computes RL-ZVP's advantage of uniform groups (arXiv 2509.21880): entropy confirms right
    answers and discourages wrong ones.

        all right:  A_t = + alpha * H_t
        all wrong:  A_t = - alpha * (max_j H_j - H_t)        max over the response's masked tokens

    H is detached (`old_entropy`, nats). `kind` is that of each row's group. 0 for every other kind
    and outside the mask.
    """
    require_shape("rl_zvp_advantage", old_entropy.shape[:2], old_entropy=old_entropy, mask=mask)
    require_shape("rl_zvp_advantage", old_entropy.shape[:1], kind=kind)
    zero = jnp.zeros((), old_entropy.dtype)
    # The paper recomputes H under the current policy in every mini-batch. The old policy's is fixed
    # for the rollout, so that `prepare` computes the advantage once.
    entropy = jax.lax.stop_gradient(jnp.where(mask, old_entropy, zero))
    right = alpha * entropy
    wrong = -alpha * (masked_max(entropy, mask, axis=1, keepdims=True) - entropy)
    advantage = jnp.where(
        (kind == GroupKind.ALL_RIGHT)[:, None],
        right,
        jnp.where((kind == GroupKind.ALL_WRONG)[:, None], wrong, zero),
    )
    return jnp.where(mask, advantage, zero)


def waste(
    mask: Bool[Array, "b t"],
    known: Bool[Array, "b"],
    row_kind: Int[Array, "b"],
    group_kinds: Int[Array, "g"],
    *,
    rl_zvp: bool,
    by_shaping: Bool[Array, "b"],
    uniform_teaches: bool = False,
    dtype=jnp.float32,
) -> Diagnostics:
    """Counts the generated tokens by their training signal, and the uniform groups.

    `mask` holds every generated token, and so none of a group that is replayed from an earlier
    step. Samples with an unknown reward cost as much as others: they are in `frac_none`, as are
    undecided groups, uniform ones in between and, without `rl_zvp`, all uniform ones. With
    `uniform_teaches` (Advantage.uniform_teaches) the known samples of all these groups are in
    `frac_prediction_signal`. The five shares sum to 1. `by_shaping` marks the rows of uniform
    groups whose advantage comes from stage 3. `rate_all_right` and `rate_all_wrong` are shares of
    the groups with at least two known rewards.
    """
    require_shape("waste", mask.shape[:1], known=known, row_kind=row_kind, by_shaping=by_shaping)
    uniform = (row_kind == GroupKind.ALL_RIGHT) | (row_kind == GroupKind.ALL_WRONG)
    verifier = known & (row_kind == GroupKind.VARIED)
    shaping = known & by_shaping
    entropy = known & uniform & ~by_shaping & rl_zvp
    prediction = known & ~(verifier | shaping | entropy) & uniform_teaches
    no_signal = ~(verifier | shaping | entropy | prediction)
    rows_of = (verifier, shaping, entropy, prediction, no_signal)
    decided = group_kinds != GroupKind.UNDECIDED
    return {
        "waste/tokens_generated": (jnp.sum(mask).astype(dtype),),
        **{
            f"waste/frac_{name}": share_of(jnp.broadcast_to(rows[:, None], mask.shape), mask, dtype)
            for name, rows in zip(SIGNALS, rows_of, strict=True)
        },
        "zero_variance/rate_all_right": share_of(
            group_kinds == GroupKind.ALL_RIGHT, decided, dtype
        ),
        "zero_variance/rate_all_wrong": share_of(
            group_kinds == GroupKind.ALL_WRONG, decided, dtype
        ),
    }


def waste_of_replaced(outcomes: Sequence[Outcome]) -> Diagnostics:
    """Counts the tokens and the kinds of sampled groups that replayed groups replaced, to merge
    with `waste`: they have no signal.
    """
    decided = jnp.float32(sum(x.known >= 2 for x in outcomes))
    return waste_of_dropped(sum(x.sampled_tokens for x in outcomes)) | {
        f"zero_variance/rate_all_{name}": (
            jnp.float32(sum(x.kind == kind for x in outcomes)),
            decided,
        )
        for name, kind in (("right", "easy"), ("wrong", "hard"))
    }


def waste_of_dropped(tokens: int) -> Diagnostics:
    """Counts the tokens of groups that are not trained on, to merge with `waste`: they have no
    signal.
    """
    count, zero = jnp.float32(tokens), jnp.zeros((), jnp.float32)
    # Every share gets the tokens in its denominator, so that they still sum to 1 when merged.
    shares = {name: (count if name == "none" else zero, count) for name in SIGNALS}
    return {
        "waste/tokens_generated": (count,),
        **{f"waste/frac_{name}": share for name, share in shares.items()},
    }
