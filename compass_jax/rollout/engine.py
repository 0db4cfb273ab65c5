"""Prefill, insert and generate over a DecodeState: JetStream's engine contract (its later form),
pure, jitted, donated.

A prefill serves all samples of its prompts: it returns a Prefix with the first token of every
sample, `bulk_insert` puts samples into slots, `generate` decodes many tokens per call on the
device. Nothing here reads a clock or the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt, UInt32

from compass_jax.config import ComputeConfig, ModelConfig, RolloutConfig
from compass_jax.model.attention import takes_kernel
from compass_jax.model.moe import empty_routes, unset_id
from compass_jax.model.params import decode_layout
from compass_jax.model.routes import take_routes
from compass_jax.model.transformer import Transformer, attention_kernel
from compass_jax.rollout.decode import decoded
from compass_jax.rollout.insert import inserted
from compass_jax.rollout.kv_cache import check_pages
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.prefill import prefilled, prompt_logprobs
from compass_jax.rollout.sampling import Purpose, RowSampling, Sampler, sample_keys
from compass_jax.rollout.sizes import resume_buckets
from compass_jax.rollout.state import DecodeState, Prefix, empty_state, lay, lay_state
from compass_jax.sharding import Placement, move


class Engine:
    """The sampler of one model. Parameters come in the decode layout with every call; the engine
    holds none.

    Engines of equal settings are equal, so that they share what was compiled. Each of `end_ids`
    ends a sequence. `known` ids are tokens; the LM head's other columns are never drawn (None: all
    are tokens).
    """

    def __init__(
        self,
        model: ModelConfig,
        compute: ComputeConfig,
        rollout: RolloutConfig,
        end_ids: int | Sequence[int],
        placement: Placement | None = None,
        known: int | None = None,
    ):
        self.model_config, self.compute, self.config = model, compute, rollout
        self.end_ids = (end_ids,) if isinstance(end_ids, int) else tuple(end_ids)
        self.placement = placement
        self.layout = decode_layout(compute)
        check_pages(rollout, self.slot_groups)
        self.model = Transformer(model, compute, self.layout, placement, known)

    def _settings(self):
        return self.model, self.config, self.end_ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Engine) and self._settings() == other._settings()

    def __hash__(self) -> int:
        return hash(self._settings())

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""
        return self.config.slots

    @property
    def slot_groups(self) -> int:
        """Devices, or groups of them, over which the slots are split."""
        return (
            1
            if self.placement is None
            else self.placement.size(*self.placement.batch_axes(self.config.slots))
        )

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt in tokens."""
        return self.config.prompt_buckets[-1]

    @property
    def samples_per_slot(self) -> int:
        """Sequences per slot."""
        return 1

    def bucket(self, length: int) -> int:
        """Smallest prompt bucket that holds `length` tokens; ValueError beyond the longest."""
        for size in self.config.prompt_buckets:
            if length <= size:
                return size
        raise ValueError(
            f"a prompt of {length} tokens exceeds the longest bucket of rollout.prompt_buckets"
            f" {self.config.prompt_buckets}"
        )

    def resume_bucket(self, length: int) -> int:
        """Size to which `length` tokens of a sample that goes on are padded: a prompt bucket, or
        the longest one doubled until it holds them.
        """
        if length <= self.max_prefill_length:
            return self.bucket(length)
        return next(size for size in resume_buckets(self.config) if size >= length)

    @partial(jax.jit, static_argnums=(0, 1))
    def init_decode_state(self, top_logprobs: int = 0) -> DecodeState:
        """An empty state: no slot is live. top_logprobs: the sampler's."""
        return empty_state(self.model, self.config, self.slot_groups, top_logprobs)

    def prefill(
        self,
        *,
        params,
        existing_prefix=None,
        padded_tokens: Int[Array, "t"],
        true_length: int,
        sampler=None,
        request_id: int = 0,
    ) -> Prefix:
        """One prompt, one sample, keyed by `request_id`. `existing_prefix` is not supported:
        ValueError.
        """
        if existing_prefix is not None:
            raise ValueError(
                "prefill onto an existing prefix is not supported: pass the whole prompt"
            )
        one = jnp.zeros((1,), jnp.uint32)
        keys = sample_keys(0, Purpose.SERVE, one + jnp.uint32(request_id), one, one)
        lengths = jnp.array([true_length], jnp.int32)
        tokens = jnp.asarray(padded_tokens, jnp.int32)[None]
        return self.prefill_multisampling(
            params=params,
            padded_tokens=tokens,
            true_length=lengths,
            sampler=sampler,
            rng=keys[None],
            num_samples=1,
        )

    def prefill_multisampling(
        self,
        *,
        params,
        padded_tokens: Int[Array, "p t"],
        true_length: Int[Array, "p"],
        sampler: Sampler | None,
        rng: UInt32[Array, "p s 2"],
        num_samples: int,
        sampling: RowSampling | None = None,
        routes: UInt[Array, "p t l k"] | None = None,
    ) -> Prefix:
        """`p` prompts padded to one bucket, run once for all their samples; `rng` has one key per
        sample (`sample_keys`).

        `sampling` of each prompt's samples belongs to a `per_request` sampler: ValueError for
        one without the other. `routes`: recorded routes of the tokens (of samples that go on,
        say), live where unset.
        """
        if rng.shape[1] != num_samples:
            raise ValueError(
                f"rng has keys for {rng.shape[1]} samples, num_samples = {num_samples}"
            )
        sampler = sampler or self.default_sampler()
        if sampler.per_request != (sampling is not None):
            raise ValueError(
                "a per_request sampler needs the parameters of each prompt, and no other takes them"
            )
        return self._prefill(params, padded_tokens, true_length, rng, sampler, sampling, routes)

    def default_sampler(self) -> Sampler:
        """The sampler of the rollout configuration."""
        return Sampler(self.config.temperature, self.config.top_k, self.config.top_p)

    @partial(jax.jit, static_argnums=(0, 5))
    def _prefill(self, params, tokens, lengths, keys, sampler, sampling, routes) -> Prefix:
        return prefilled(
            self.model, self.config, params, tokens, lengths, keys, sampler, sampling, routes
        )

    @partial(jax.jit, static_argnums=(0, 4))
    def prompt_logprobs(
        self, params, tokens: Int[Array, "1 t"], lengths: Int[Array, "1"], most: int
    ) -> TopLogprobs:
        """[t k]: row i of token i of a prompt, given those before it, and of the `most` likeliest
        in its place; of the first token, which nothing precedes, its id alone.
        """
        return prompt_logprobs(self.model, self.config, params, tokens, lengths, most)

    def insert(
        self, prefix: Prefix, decode_state: DecodeState, slot: int, request_id=None
    ) -> DecodeState:
        """Puts the first sample of the first prompt into `slot`. ValueError with
        `rollout.cache_pages`: JetStream's callers assign no pages.
        """
        if self.config.cache_pages:
            raise ValueError(
                f"rollout.cache_pages = {self.config.cache_pages}: insert assigns no pages; use 0,"
                " or a Collection"
            )
        slots = jnp.full(prefix.first_token.shape, -1, jnp.int32).at[0, 0].set(slot)
        return self.bulk_insert(prefix, decode_state, slots)

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def bulk_insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slots: Int[Array, "p s"],
        max_new_tokens: Int[Array, "p"] | None = None,
    ) -> DecodeState:
        """Puts sample `s` of prompt `p` into `slots[p, s]`; -1 leaves it out (for a later call with
        the same prefix).

        `max_new_tokens` cuts the samples of each prompt, from 1 to the configuration's (None:
        there); what lies outside is moved to these.
        """
        return inserted(
            self.config, self.end_ids, self.placement, prefix, decode_state, slots, max_new_tokens
        )

    def generate(
        self,
        params,
        decode_state: DecodeState,
        sampler: Sampler | None = None,
        *,
        read: int | None = None,
        wanted_free: int | None = None,
        top_logprobs: bool = False,
    ) -> tuple[DecodeState, Int[Array, ""]]:
        """Decodes up to `tokens_per_call` tokens in every live slot; returns the state and the
        number of steps taken.

        Stops early when no slot is live, or when `wanted_free` slots are free (None: never). `read`
        bounds the cache positions that attention reads; it must cover the longest live sequence
        plus tokens_per_call. `top_logprobs`: whether anybody wants those for which the state has
        room.
        """
        wanted = jnp.int32(self.config.slots + 1 if wanted_free is None else wanted_free)
        # the kernel reads no more than each sequence has
        read = None if self.in_place(decode_state) else read
        sampler = sampler or self.default_sampler()
        if decode_state.top is None:
            return self._generate(params, decode_state, wanted, sampler, read)
        told = jnp.bool_(top_logprobs)
        return self._generate(params, decode_state, wanted, sampler, read, told)

    def in_place(self, state: DecodeState) -> bool:
        """Whether decoding reads and writes the cache where it lies, by the kernel; else `generate`
        works on a copy of what it may read.
        """
        return attention_kernel(self.compute) == "splash" and takes_kernel(
            state.cache[0], state.table is not None
        )

    @partial(jax.jit, static_argnums=(0, 4, 5), donate_argnums=2)
    def _generate(self, params, state: DecodeState, wanted_free, sampler, read, told=None):
        return decoded(
            self.model,
            self.config,
            self.end_ids,
            params,
            state,
            wanted_free,
            sampler,
            read,
            self.in_place(state),
            told,
        )

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def free_resource(self, slot: Int[Array, ""], decode_state: DecodeState) -> DecodeState:
        """Gives a slot up; what it generated is forgotten."""
        return lay_state(
            self.placement, decode_state._replace(live=decode_state.live.at[slot].set(False))
        )

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def harvest(
        self,
        state: DecodeState,
        store: UInt[Array, "rows t l k"] | None,
        slots: Int[Array, "n"],
        rows: Int[Array, "n"],
    ):
        """(tokens, logp, entropy) `[n t]` of finished slots for the host; their routes are copied
        on the device to rows of `store`.

        `rows` out of range are not stored.
        """
        out = tuple(
            jnp.take(x, slots, axis=0, mode="clip")
            for x in (state.tokens, state.logp, state.entropy)
        )
        if store is not None:
            assert state.routes is not None
            store = lay(
                self.placement,
                store.at[rows].set(jnp.take(state.routes, slots, axis=0, mode="clip"), mode="drop"),
                "batch",
            )
        return out, store

    @partial(jax.jit, static_argnums=0)
    def recent(
        self, state: DecodeState, since: Int[Array, "slots"]
    ) -> tuple[Int[Array, "slots n"], Float[Array, "slots n"], Float[Array, "slots n"]]:
        """(tokens, logp, entropy) of each slot from position `since` on: as many as a prefill and
        one call of `generate` can have added. What lies beyond a sequence's length says nothing.
        """
        at = since[:, None] + jnp.arange(self.config.tokens_per_call + 1, dtype=jnp.int32)[None]

        def rows(x):
            return jnp.take_along_axis(x, at, axis=1, mode="clip")

        return rows(state.tokens), rows(state.logp), rows(state.entropy)

    @partial(jax.jit, static_argnums=(0, 3))
    def stored_routes(
        self, store: UInt[Array, "rows t l k"], rows: Int[Array, "n"], length: int
    ) -> UInt[Array, "n length l k"]:
        """The routes of the first `length` tokens of `rows`; unset for rows out of range."""
        return jnp.take(
            store[:, :length], rows, axis=0, mode="fill", fill_value=unset_id(store.dtype)
        )

    @partial(jax.jit, static_argnums=0)
    def taken_routes(
        self, store: UInt[Array, "rows t l k"], rows: Int[Array, "n"]
    ) -> UInt[Array, "n t l k"]:
        """A copy of `rows`, unset for those out of range, laid out by rows over a mesh.

        A gather from a split axis has its whole result on every device first. So it runs in turns,
        and each turn has one row for each device.
        """
        if self.placement is None:
            return take_routes(store, rows, store.shape[1])
        axes = self.placement.batch_axes(len(rows))
        parts = self.placement.size(*axes)
        layout = self.placement.sharding(axes or None)

        def turn(some: Int[Array, "parts"]) -> UInt[Array, "parts t l k"]:
            taken = take_routes(store, some, store.shape[1])
            return jax.lax.with_sharding_constraint(taken, layout)

        turns = jax.lax.map(turn, rows.reshape(parts, -1).T)
        taken = jnp.swapaxes(turns, 0, 1).reshape(len(rows), *store.shape[1:])
        return jax.lax.with_sharding_constraint(taken, layout)

    def adopt(self, store: UInt[Array, "rows t l k"] | None) -> UInt[Array, "rows t l k"] | None:
        """A store from elsewhere (a checkpoint), on the devices that sample."""
        return (
            store
            if store is None or self.placement is None
            else move(store, self.placement.rows(store.shape[0]))
        )

    @partial(jax.jit, static_argnums=(0, 1))
    def new_routes(self, rows: int) -> UInt[Array, "rows t l k"] | None:
        """Room for the routes of `rows` sequences, unset; None for a dense model."""
        store = empty_routes(self.model_config, rows, self.config.max_length)
        return None if store is None else lay(self.placement, store, "batch")
