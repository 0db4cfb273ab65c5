"""Drafts (SPEC-RL, arXiv 2509.23232): which tokens of an earlier answer begin a new one.

    p_i = softmax(logits_i / T)[y_i] under the present policy, q_i under the policy of the draft y

`Engine.prefill_drafts` scores whole drafts in one pass. The accepted prefix ends before the first
token that `accepted` refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from compass_jax.config.drafts import Drafts
from compass_jax.config.ranges import Range


class DraftInputs(NamedTuple):
    """`n` tokens of drafts, each after the draft's tokens before it."""

    token: Int[Array, "n"]  # the draft's
    drawn: Int[Array, "n"]  # the one that the sampler draws here with the sample's key
    logp: Float[Array, "n"]  # log p of the draft's token, nats
    draft_logp: Float[Array, "n"]  # log q of it, nats
    uniform: Float[Array, "n"]  # a number in [0, 1) of this sample, visit and position


class DraftRows(NamedTuple):
    """`p` prompts, each followed by a draft, padded to one length."""

    tokens: Int[Array, "p t"]
    lengths: Int[Array, "p"]  # of prompt and draft
    prompts: Int[Array, "p"]  # of the prompt
    draft_logp: Float[Array, "p t"]  # 0 on the prompt
    keys: UInt32[Array, "p 2"]  # the samples' keys (`sample_keys`)
    accept_keys: UInt32[Array, "p 2"]  # keys of the acceptance's draws


class DraftScores(NamedTuple):
    """The accepted prefixes; token t of logp and entropy belongs to token t."""

    lengths: Int[Array, "p"]  # of the prompt and the accepted tokens
    logp: Float[Array, "p t"]
    entropy: Float[Array, "p t"]


@dataclass(frozen=True)
class Lenient(Drafts):
    """Accepts token i with probability min(1, l p_i / q_i), l >= 1 the lenience:

        log u_i <= log p_i - log q_i + log l,    u_i uniform in [0, 1)

    This is the rule of SPEC-RL (arXiv 2509.23232). Even l = 1 does not sample from p: exact
    speculative sampling (arXiv 2211.17192) draws the token after a rejection from max(p - q, 0),
    normalised, which needs all of q. Here it is drawn from p, so that a token x where the draft may
    be refused has probability

        min(q(x), l p(x)) + (1 - sum_y min(q(y), l p(y))) p(x)

    A larger l accepts more tokens and leans further towards q. The log-probs of the answer are
    those of p all the same, so no correction sees the difference.
    """

    lenience: Annotated[float, Range(1, 1e6, note="1: by the ratio of probabilities")] = 1.65
    """Lenience l, a factor of the acceptance probability p / q; 1.65 is the authors' e^0.5."""

    def accepted(self, inputs: DraftInputs) -> Bool[Array, "n"]:
        """Returns whether each token is accepted."""
        log_l = jnp.log(jnp.asarray(self.lenience, inputs.logp.dtype))
        return jnp.log(inputs.uniform) <= inputs.logp - inputs.draft_logp + log_l


@dataclass(frozen=True)
class Coupled(Drafts):
    """Accepts a token if the sampler draws it with the noise of the draft:

        y_i = argmax_v (logits_i(v) / T + Gumbel(prompt, visit // refresh, sample; i)(v))

    Every sample has this noise, with a draft or without one, so an answer equals the one that is
    sampled without drafts with these keys, except where rounding decides a tie. Exact: given the
    parameters, an answer has the present policy's distribution over the noise. Not exact: the
    parameters depend on earlier answers, which had the same noise at up to `refresh` visits, so
    that an answer is not independent of them. At the first visit with new noise no draft is used.
    """

    refresh: Annotated[int, Range(2, 10**9, note="at 1 no two visits share noise")] = 4
    """Number of visits of a prompt that share the noise of its samples."""

    def accepted(self, inputs: DraftInputs) -> Bool[Array, "n"]:
        """Returns whether each token is accepted."""
        return inputs.token == inputs.drawn

    def noise_visit(self, visit: int) -> int:
        """Returns the number that keys the draws at a visit."""
        return visit // self.refresh
