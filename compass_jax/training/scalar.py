"""A scalar reward model: one number for an answer, from a head on the decoder; its training on
preferences, and its use.

    r(x, y) = h_last . w                                 w: the LM head's column of the end token
    P(candidate beats anchor) = sigmoid(r_candidate - r_anchor)     [Bradley and Terry 1952;
                                                                     arXiv 2203.02155, eq. 1]

The number is the logit of the end token after a finished answer, which has no other use: so the
reward model is stored, sharded and exported like any model, without an extra tensor. A tie is half
a win of either answer [this project's choice].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from compass_jax.base.aliases import Tree
from compass_jax.config import DataConfig, PolicyConfig
from compass_jax.config.errors import check
from compass_jax.data.pairs import Pair, conversation, encode_pairs, split_pairs
from compass_jax.data.tokenizer import Tokenizer, load_tokenizer
from compass_jax.devices.sharding import fetch, placements
from compass_jax.model.logprobs import head_weights
from compass_jax.model.lora import trainable
from compass_jax.model.moe import RouterStats
from compass_jax.model.params import training_layout
from compass_jax.model.precision import at_least_float32
from compass_jax.model.transformer import Transformer, apply
from compass_jax.rl.bucketing import plan, take_rows
from compass_jax.rl.diagnostics import Diagnostics
from compass_jax.training import step
from compass_jax.training.sft import SFTTrainer
from compass_jax.weights.start import first_parameters


def scalar_rewards(
    model: Transformer,
    params: Tree,
    tokens: Int[Array, "b t"],
    lengths: Int[Array, "b"],
    column: int,
) -> tuple[Float[Array, "b"], RouterStats | None]:
    """Computes (rewards, router statistics) of conversations that end with an answer; `column` is
    the end token's id. The reward of a padding row (length 0) is undefined.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    mask = positions < lengths[:, None]
    out = apply(model, params, tokens, positions, mask=mask)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(out.hidden, last, axis=1)[:, 0]
    wide = at_least_float32(hidden.dtype)
    head = head_weights(params)[:, column].astype(wide)
    return jnp.sum(hidden.astype(wide) * head[None], axis=-1), out.aux


def pair_losses(
    candidate: Float[Array, "n"], anchor: Float[Array, "n"], gold: Int[Array, "n"]
) -> Float[Array, "n"]:
    """Computes the negative log-likelihood of verdicts in nats: cross-entropy of sigmoid(candidate
    - anchor) with 1 for Better (gold 1), 1/2 for Tie (0), 0 for Worse (-1).
    """
    margin = candidate - anchor
    won = (1 + gold.astype(margin.dtype)) / 2
    return -(won * jax.nn.log_sigmoid(margin) + (1 - won) * jax.nn.log_sigmoid(-margin))


rewards_of = partial(jax.jit, static_argnames=("model", "column"))(scalar_rewards)


class ScalarTrainer(SFTTrainer):
    """Fits a scalar reward model to the training pairs of `config.data`, with the settings of
    `config.sft`; its batch counts pairs.
    """

    STAGE = "scalar"

    def examples(self) -> tuple[Sequence[Pair], dict[str, int]]:
        """Returns the training pairs. Raises DataError where none can be used."""
        mixed = "sft.weights mixes conversations by their labels, and pairs have none: leave it out"
        check(not self.sft.weights, mixed)
        check(
            not self.sft.packing,
            "sft.packing with a scalar reward model: each answer of a pair needs its own row,"
            " since the reward is read at its end; set sft.packing to False",
        )
        training, _ = split_pairs(self.config.data, self.config.seed)
        return encode_pairs(training, self.tokenizer, self.sft.buckets[-1], self.telemetry.note)

    def micro_batches(self, examples: Sequence[Pair]) -> Iterator[tuple[Tree, ...]]:
        """Yields (tokens [2 n t], lengths [2 n], gold [n], weights [n]) of each micro-batch: n
        candidates, then their anchors. The weights are 1 / pairs of the update.
        """
        longest = self.sft.buckets[-1]
        shape = (2, len(examples), longest)
        tokens = np.zeros(shape, np.int32)
        lengths: np.ndarray = np.zeros(shape[:2], np.int32)
        for n, pair in enumerate(examples):
            for side, ids in enumerate((pair.candidate, pair.anchor)):
                tokens[side, n, : len(ids)], lengths[side, n] = ids, len(ids)
        gold = np.array([pair.gold for pair in examples], np.int32)
        weight = np.full(len(examples), 1 / len(examples), np.float32)
        # A pair's answers share a micro-batch, so both get the bucket of the longer one.
        for micro in self.planned(lengths.max(0), rows=2):
            t, sizes = (
                np.concatenate([take_rows(x, micro.rows, micro.length) for x in sides])
                for sides in (tokens, lengths)
            )
            g, w = (take_rows(x, micro.rows, micro.length) for x in (gold, weight))
            yield t, sizes, g, w

    def gradients(self, *arrays: Tree) -> tuple[Tree, Diagnostics]:
        """Returns one micro-batch's part of the gradient, and its diagnostics."""
        column, aux_coef = self.tokenizer.eos_id, self.sft.router_aux_coef
        return pair_gradients(self.model, self.params, *arrays, aux_coef, column=column)


@partial(jax.jit, static_argnames=("model", "column"))
def pair_gradients(
    model: Transformer,
    params: Tree,
    tokens: Int[Array, "m t"],
    lengths: Int[Array, "m"],
    gold: Int[Array, "n"],
    weight: Float[Array, "n"],
    aux_coef: float,
    *,
    column: int,
) -> tuple[Tree, Diagnostics]:
    """Computes the gradient of sum(weight * pair_losses) plus the load-balancing loss, and its
    diagnostics. Rows are n candidates, then their n anchors; the weights sum to 1 over an update.
    """

    trained, in_params = trainable(params)

    def loss(trained):
        rewards, aux = scalar_rewards(model, in_params(trained), tokens, lengths, column)
        candidate, anchor = jnp.split(rewards, 2)
        losses = jnp.sum(weight * pair_losses(candidate, anchor, gold))
        total = losses
        if aux is not None:
            # The weights of an update sum to 1: their sum here is the micro-batch's share.
            balance = step.load_balancing_loss(aux, model.config.mixture.top_k)
            total += (aux_coef * jnp.sum(weight) * balance).astype(total.dtype)
        return total, (losses, candidate - anchor, aux)

    grads, (losses, margin, aux) = jax.grad(loss, has_aux=True)(trained)
    decided = jnp.where(gold != 0, weight, 0)
    right = jnp.where(margin * gold.astype(margin.dtype) > 0, weight, 0)
    return step.constrained(model, grads), {
        "loss": (losses,),
        "scalar/right_frac": (jnp.sum(right), jnp.sum(decided)),
        "scalar/margin": (jnp.sum(weight * jnp.abs(margin)), jnp.sum(weight)),
        **step.router_diagnostics(aux),
    }


class ScalarModel:
    """Computes rewards of answers with the weights of a run, a checkpoint or a Hugging Face folder.

    Args:
        policy: model, mesh and precision of the training.
        data: the tokenizer.
        weights: path of the weights.
        buckets: lengths in tokens to which conversations are padded.
        micro_batch_tokens: tokens in a forward pass, padding included.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        data: DataConfig,
        weights: str,
        buckets: Sequence[int],
        micro_batch_tokens: int,
    ):
        self._tokenizer: Tokenizer = load_tokenizer(data, policy.model.vocab_size)
        self._model = Transformer(
            policy.model,
            policy.compute,
            training_layout(policy.compute),
            placements(policy.mesh, None, False)[0],
            self._tokenizer.vocab_size,
        )
        self._params = first_parameters(weights, 0, self._model)
        self._buckets, self._micro_batch_tokens = tuple(buckets), micro_batch_tokens

    def __call__(self, questions: Sequence[tuple[str, str]]) -> list[float | None]:
        """Returns the reward of each (question, answer); None where it exceeds the last bucket."""
        encode = self._tokenizer.encode_example
        rows = [encode(conversation(question, answer))[0] for question, answer in questions]
        results: list[float | None] = [None] * len(rows)
        fits = [n for n, ids in enumerate(rows) if len(ids) <= self._buckets[-1]]
        lengths = np.array([len(rows[n]) for n in fits], np.int32)
        tokens = np.zeros((len(fits), self._buckets[-1]), np.int32)
        for place, n in enumerate(fits):
            tokens[place, : lengths[place]] = rows[n]
        placement = self._model.placement
        multiple = 1 if placement is None else placement.rows_multiple
        budget = self._micro_batch_tokens
        for micro in plan(lengths, self._buckets, budget, rows_multiple=multiple):
            t, n = (take_rows(x, micro.rows, micro.length) for x in (tokens, lengths))
            rewards, _ = rewards_of(self._model, self._params, t, n, column=self._tokenizer.eos_id)
            for place, reward in zip(micro.rows, np.asarray(fetch(rewards)), strict=True):
                if place >= 0:
                    results[fits[place]] = float(reward)
        return results
