"""Turns raw rewards into advantages, weights and masks of an update. Pure; arguments that are not
arrays are static.

Zero variance, groups whose rewards are all equal, is treated in four stages: 1 selection of prompts
(data/selection.py), 2 growth of groups (experience/growth.py), 3 shaping by penalties and 4 RL-ZVP,
advantages from entropies, both here.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from compass_jax.base.records import EARLIER, GOLD, SAMPLE, SAMPLED, TRUNCATED
from compass_jax.config import AlgorithmConfig, Objective
from compass_jax.rl.correction import correction_weight
from compass_jax.rl.diagnostics import Diagnostics, mean_of
from compass_jax.rl.group_advantage import group_advantage
from compass_jax.rl.grouping import group_any, group_sum, per_row, sample_rows
from compass_jax.rl.objectives.inputs import UpdateShares, update_shares
from compass_jax.rl.policy import token_weights
from compass_jax.rl.shapes import require_shape
from compass_jax.rl.shaping import inversion, penalties
from compass_jax.rl.zero_variance import GroupKind, group_kind, rl_zvp_advantage, waste

TRAINED = "trained_tokens"  # the diagnostic of an update of which some rows have tokens


class Prepared(NamedTuple):
    """The arrays that an update trains on, per token; 0, False or -1 at tokens that are not
    trained.
    """

    advantage: Float[Array, "b t"]
    weight: Float[Array, "b t"]
    mask: Bool[Array, "b t"]  # trained tokens: generated, of samples with a known reward
    entropy_group: Int[Array, "b t"] | None  # of objectives that group tokens (espo)
    kl_weight: Float[Array, "b t"] | None = None  # of the KL penalty; None: `weight`

    def of_responses(self) -> np.ndarray:
        """Returns the mean advantage over each response's trained tokens `[b]`, on the host; NaN
        for a response without trained tokens.
        """
        tokens = np.sum(self.mask, axis=1)
        total = np.sum(self.advantage, axis=1, where=self.mask, dtype=np.float64)
        return np.where(tokens > 0, total / np.maximum(tokens, 1), np.nan)

    def without_gradient(self) -> np.ndarray:
        """Returns which responses `[b]` have no trained token with an advantage, on the host."""
        return ~np.any(self.mask & (self.advantage != 0), axis=1)


class UpdateRows(NamedTuple):
    """Every row of one update, in any order: the weights' denominators run over all of them. n:
    rows; t: tokens of a row; b: the rows with tokens here, all or those at `places`. The result has
    the dtype of `old_entropy` and `reward`, which must agree.
    """

    mask: Bool[Array, "b t"]  # all generated tokens
    reward: Float[Array, "n"]
    known: Bool[Array, "n"]  # whether the verifier gave a reward
    group: Int[Array, "n"]  # the prompt of each row, in 0..n_groups-1; -1 for a padding row
    old_entropy: Float[Array, "b t"]  # nats
    old_logp: Float[Array, "b t"] | None = None  # the trainer's, for a correction
    rollout_logp: Float[Array, "b t"] | None = None  # the sampler's
    ref_logp: Float[Array, "b t"] | None = None
    repetition: Float[Array, "n"] | None = None  # share of repeated n-grams, for a penalty
    columns: dict[str, Array] | None = None  # [n] or [n t], by name: those of records.StepArrays
    lengths: Int[Array, "n"] | None = None  # generated tokens; None: those of the mask
    places: Int[Array, "b"] | None = None  # None: all rows in order; n: a padding row

    def with_tokens(self, x: Shaped[Array, "n ..."]) -> Shaped[Array, "b ..."]:
        """Returns the values of the rows with tokens."""
        return x if self.places is None else x.at[self.places].get(mode="clip")

    def finite(self) -> Bool[Array, "n"]:
        """Returns whether entropies and log-probs are finite, as those of rows without tokens are
        taken to be.
        """
        finite = _finite(self.mask, *self[4:8])
        if self.places is None:
            return finite
        return jnp.ones(self.reward.shape, bool).at[self.places].set(finite, mode="drop")


class RewardScale(NamedTuple):
    """The rewards from which on a response is right, and up to which it is wrong; the tokens by
    which length penalties and some objectives normalise; and the samples of a usual group, by which
    advantages that weigh all samples alike normalise.
    """

    right_at: float
    wrong_at: float
    max_new_tokens: int
    group_size: int | None = None  # None: each group counts as a usual one


def prepare(
    rows: UpdateRows, *, n_groups: int, config: AlgorithmConfig, scale: RewardScale
) -> tuple[Prepared, Diagnostics]:
    """Computes advantages and weights of one update's rows, and its diagnostics
    (`finalize_diagnostics` turns them into metrics). Where some rows have no tokens here, those of
    the others are as they would be, unless the objective combines responses, and TRAINED, the
    number of trained tokens of the whole update, is the only diagnostic.

    A response whose reward, entropies or log-probs are not finite is one of unknown reward. Two
    responses of a group are an inverted pair if their advantages are ordered against the column
    GOLD, or the reward without it. The account of tokens and of uniform groups leaves out rows of
    the column EARLIER and tokens that are not in SAMPLED. Rows of the column TRUNCATED have no
    trained token. Rows of one number in the column SAMPLE are one sample (`SampleRows`), whose
    reward, repetition and other columns are those of its first row.

    Raises:
        ValueError: a setting needs an array that is None, or shapes differ.
    """
    mask, reward, known, group, old_entropy = rows[:5]
    columns, pick = rows.columns or {}, rows.with_tokens
    _check_shapes(rows)
    lengths = jnp.sum(mask, axis=1, dtype=jnp.int32) if rows.lengths is None else rows.lengths
    samples = sample_rows(group, columns.get(SAMPLE), n_groups)
    known = known & (group >= 0) & jnp.isfinite(reward) & rows.finite()
    known = known & ~samples.any(~known)
    # A truncated answer is part of its group, and in no denominator of the weights.
    taught = known & ~samples.any(columns[TRUNCATED]) if TRUNCATED in columns else known
    trained, counted = mask & pick(taught)[:, None], known & samples.counted

    # From raw rewards: a penalty must not hide a uniform group from the stages that act on it.
    at = {"right_at": scale.right_at, "wrong_at": scale.wrong_at}
    kinds = group_kind(reward, counted, group, n_groups, **at)
    row_kind = jnp.where(group >= 0, per_row(kinds, group), int(GroupKind.UNDECIDED))
    objective = config.objective
    # Stage 3: penalties make a group of right answers vary; `by_shaping` marks the rows of groups
    # that vary by them alone.
    shaped, components = _shape(rows, config, scale, samples.sum(lengths))
    sample_factor = None
    if objective.averages_groups and scale.group_size is not None:
        taught_samples, dtype = taught & samples.counted, old_entropy.dtype
        sample_factor = _sample_factor(group, taught_samples, n_groups, scale.group_size, dtype)
    response_advantage, by_shaping = group_advantage(
        config.advantage,
        reward,
        counted,
        group,
        n_groups,
        divides_by_std=objective.divides_by_std,
        shaped=shaped,
        columns=columns,
        right_at=scale.right_at,
        wrong_at=scale.wrong_at,
        sample_factor=sample_factor,
    )
    response_advantage, by_shaping = (x[samples.first] for x in (response_advantage, by_shaping))
    # Stage 4 acts on the groups that are uniform even so.
    still_uniform = jnp.where(by_shaping, int(GroupKind.UNDECIDED), row_kind)
    advantage = _advantage(
        pick(response_advantage), trained, old_entropy, pick(still_uniform), config
    )
    if config.entropy_bonus:
        advantage += entropy_advantage(rows, trained, config.entropy_bonus)

    several, trained_lengths = samples if SAMPLE in columns else None, jnp.where(taught, lengths, 0)
    shares = update_shares(group, taught, n_groups, trained_lengths, old_entropy.dtype, several)
    prepared = _weighted(advantage, trained, rows, taught, shares, n_groups, objective, scale)
    # The correction comes after the weights, so that dropped tokens stay in the denominator.
    prepared, corrected = _corrected(prepared, config, rows)
    if rows.places is not None:
        return prepared, {TRAINED: (shares.tokens.astype(jnp.float32),)}
    metrics = _account(rows, taught, row_kind, kinds, by_shaping, config)
    metrics |= {f"reward/{name}/mean": mean_of(x, counted) for name, x in components.items()}
    metrics |= corrected | inversion(
        *_labels(reward, counted, columns.get(GOLD)), advantage, trained, group
    )
    return prepared, metrics


def _check_shapes(rows: UpdateRows) -> None:
    """Raises ValueError where shapes differ."""
    mask, reward, known, group, old_entropy = rows[:5]
    require_shape("prepare", (None, None), mask=mask)
    require_shape("prepare", mask.shape, old_entropy=old_entropy)
    require_shape("prepare", mask.shape[:1], places=rows.places)
    shape = mask.shape[:1] if rows.places is None else group.shape
    require_shape("prepare", shape, reward=reward, known=known, group=group)


def _weighted(
    advantage: Float[Array, "b t"],
    trained: Bool[Array, "b t"],
    rows: UpdateRows,
    taught: Bool[Array, "n"],
    shares: UpdateShares,
    n_groups: int,
    objective: Objective,
    scale: RewardScale,
) -> Prepared:
    """Returns the rows with the weights of their tokens."""
    group, known, *weights = map(rows.with_tokens, (rows.group, taught, *shares[:2]))
    with objective.calling("groups"):
        entropy_group = objective.groups(rows.old_entropy, trained)
    weight = token_weights(
        trained,
        group,
        known,
        n_groups,
        objective,
        entropy_group,
        rows.old_entropy.dtype,
        scale.max_new_tokens,
        UpdateShares(weights[0], weights[1], shares.tokens),
    )
    return Prepared(advantage, weight, trained, entropy_group)


def _account(
    rows: UpdateRows,
    taught: Bool[Array, "b"],
    row_kind: Int[Array, "b"],
    kinds: Int[Array, "g"],
    by_shaping: Bool[Array, "b"],
    config: AlgorithmConfig,
) -> Diagnostics:
    """Returns the account of the tokens that the step sampled."""
    columns = rows.columns or {}
    sampled_rows, kinds = _sampled(rows.group, kinds, columns.get(EARLIER))
    return waste(
        columns.get(SAMPLED, rows.mask) & sampled_rows[:, None],
        taught,
        row_kind,
        kinds,
        rl_zvp=config.zero_variance.rl_zvp,
        uniform_teaches=config.advantage.uniform_teaches,
        by_shaping=by_shaping,
        dtype=rows.old_entropy.dtype,
    )


def _sample_factor(
    group: Int[Array, "b"], taught: Bool[Array, "b"], n_groups: int, group_size: int, dtype
) -> Float[Array, "b"]:
    """Returns s_g / group_size for the s_g trained samples of each row's group. In a mean over a
    group's samples a sample then weighs 1 / group_size, whatever s_g is.
    """
    samples = per_row(group_sum(taught.astype(jnp.int32), group, n_groups), group)
    return samples.astype(dtype) / group_size


def _sampled(
    group: Int[Array, "b"], kinds: Int[Array, "g"], earlier: Bool[Array, "b"] | None
) -> tuple[Bool[Array, "b"], Int[Array, "g"]]:
    """Returns the rows that the step sampled, and the groups' kinds (UNDECIDED if of an
    earlier one)."""
    if earlier is None:
        return group >= 0, kinds
    is_earlier = group_any(earlier, group, len(kinds))
    return (group >= 0) & ~earlier, jnp.where(is_earlier, int(GroupKind.UNDECIDED), kinds)


def _labels(
    reward: Float[Array, "b"], known: Bool[Array, "b"], gold: Float[Array, "b"] | None
) -> tuple[Float[Array, "b"], Bool[Array, "b"]]:
    """Returns the labels that inverted pairs are counted against, and which of them are known."""
    if gold is None:
        return reward, known
    has_gold = jnp.isfinite(gold)
    return jnp.where(has_gold, gold, jnp.zeros_like(gold)), known & has_gold


def _advantage(
    response_advantage: Float[Array, "b"],
    trained: Bool[Array, "b t"],
    old_entropy: Float[Array, "b t"],
    still_uniform: Int[Array, "b"],
    config: AlgorithmConfig,
) -> Float[Array, "b t"]:
    """Computes each token's advantage. Stage 4 (RL-ZVP) acts on groups that are uniform after the
    earlier stages; their advantage is 0 until then, so that adding replaces it.
    """
    zero = jnp.zeros((), old_entropy.dtype)
    advantage = jnp.where(trained, response_advantage[:, None], zero)
    if not config.zero_variance.rl_zvp:
        return advantage
    alpha = config.zero_variance.rl_zvp_alpha
    return advantage + rl_zvp_advantage(old_entropy, trained, still_uniform, alpha)


def entropy_advantage(
    rows: UpdateRows, trained: Bool[Array, "b t"], bonus: float
) -> Float[Array, "b t"]:
    """Computes the advantage bonus (-log pi_old - H_old) of each trained token. Over tokens that
    the policy draws its policy gradient is that of bonus H at each state, since E[grad log pi] = 0:

        E[(-log pi - H) grad log pi] = -sum_v log pi(v) grad pi(v) = grad H

    States that a token leads to are not credited to it, as in the bonus of PPO (arXiv 1707.06347,
    eq. 9). Raises ValueError without old_logp.
    """
    if rows.old_logp is None:
        raise ValueError(f"prepare: rl.entropy_bonus = {bonus} needs old_logp")
    zero = jnp.zeros((), rows.old_entropy.dtype)
    return jnp.where(trained, bonus * (-rows.old_logp - rows.old_entropy), zero)


def _finite(mask: Bool[Array, "b t"], *arrays: Float[Array, "b t"] | None) -> Bool[Array, "b"]:
    """Returns whether every array is finite at all tokens of the response."""
    finite = [jnp.all(jnp.isfinite(x) | ~mask, axis=1) for x in arrays if x is not None]
    return functools.reduce(jnp.logical_and, finite)


def _corrected(
    prepared: Prepared, config: AlgorithmConfig, rows: UpdateRows
) -> tuple[Prepared, Diagnostics]:
    """Multiplies the policy term's weights by the correction. The KL penalty keeps its own weights:
    a token that the correction drops is still pulled to the reference.
    """
    if not config.correction.acts:
        return prepared, {}
    if rows.old_logp is None or rows.rollout_logp is None:
        raise ValueError(
            f"prepare: rl.correction.name = {config.correction.name!r} needs old_logp,"
            " recomputed, and rollout_logp"
        )
    factor, metrics = correction_weight(
        rows.old_logp, rows.rollout_logp, prepared.mask, config.correction
    )
    kl_weight = prepared.weight if config.uses_reference else None
    return prepared._replace(weight=prepared.weight * factor, kl_weight=kl_weight), metrics


def _shape(rows: UpdateRows, config: AlgorithmConfig, scale: RewardScale, length: Int[Array, "n"]):
    """Applies stage 3: returns the shaped reward and its parts by name."""
    reward, repetition = rows.reward, rows.repetition
    if not config.shaping.total:
        return reward, {"verifier": reward}
    if config.shaping.repetition_penalty and repetition is None:
        raise ValueError(
            f"prepare: rl.shaping.repetition_penalty = {config.shaping.repetition_penalty} needs"
            " repetition, a share per response"
        )
    # Without a repetition penalty the share is multiplied by 0.
    repeated = jnp.zeros_like(reward) if repetition is None else repetition
    penalty = penalties(
        reward,
        length,
        repeated,
        config.shaping,
        right_at=scale.right_at,
        max_new_tokens=scale.max_new_tokens,
    )
    return reward - sum(penalty.values()), {
        "verifier": reward,
        **{name: -x for name, x in penalty.items()},
    }
