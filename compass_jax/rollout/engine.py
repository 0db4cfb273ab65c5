"""Prefill, insert and generate over a DecodeState: JetStream's engine contract (its later form),
pure, jitted, donated.

A prefill serves all samples of its prompts: it returns a Prefix with the first token of every
sample, `bulk_insert` puts samples into slots, `generate` decodes many tokens per call on the
device. Nothing here reads a clock or the host.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32

from compass_jax.config import ComputeConfig, ModelConfig, RolloutConfig
from compass_jax.model.attention import takes_kernel
from compass_jax.model.logprobs import head_weights, logits_of
from compass_jax.model.moe import empty_routes, unset_id
from compass_jax.model.params import decode_layout
from compass_jax.model.precision import at_least_float32
from compass_jax.model.transformer import Cache, Transformer, apply, attention_kernel, init_cache
from compass_jax.rollout.kv_cache import (
    check_pages,
    new_cache,
    pages_spec,
    put_back,
    put_prefix,
    window,
)
from compass_jax.rollout.sampling import Purpose, Sampler, sample, sample_keys
from compass_jax.sharding import Placement, constrain, move


class Prefix(NamedTuple):
    """`p` prompts after prefill, with the first token of each of their `s` samples."""

    cache: Cache  # layers of [p kv t d], or runs of [layers p kv t d] (compute.scan_decode)
    tokens: Int[Array, "p t"]
    lengths: Int[Array, "p"]
    routing: UInt[Array, "p t l k"] | None
    keys: UInt32[Array, "p s 2"]
    first_token: Int[Array, "p s"]
    first_logp: Float[Array, "p s"]
    first_entropy: Float[Array, "p s"]
    temperature: Float[Array, "p"] | None = None  # of a `per_request` sampler


class DecodeState(NamedTuple):
    """One row per slot. `t` is the longest sequence; arrays are aligned as in records.py.

    With `rollout.cache_pages` whoever drives the engine assigns pages to slots (pages.PagePool),
    and puts its `table` here before it inserts and before it generates: for every live slot the
    pages of all positions that the call may write.
    """

    # layers of [slots kv t d]; of [pages kv page d] with a table; or runs of these, stacked
    cache: Cache
    tokens: Int[Array, "slots t"]
    logp: Float[Array, "slots t"]
    entropy: Float[Array, "slots t"]
    routing: UInt[Array, "slots t l k"] | None
    # tokens so far, prompt included; the last one has not been an input yet
    lengths: Int[Array, "slots"]
    limits: Int[Array, "slots"]  # length at which the sequence is cut
    keys: UInt32[Array, "slots 2"]
    live: Bool[Array, "slots"]  # holds a sequence that is not finished
    temperature: Float[Array, "slots"]  # of a `per_request` sampler; 0 otherwise
    # the page of each stretch of a slot, out of range where there is none
    table: Int[Array, "slots n"] | None = None


class Engine:
    """The sampler of one model. Parameters come in the decode layout with every call; the engine
    holds none.

    Engines of equal settings are equal, so that they share what was compiled. `known` ids are
    tokens; the LM head's other columns are never drawn (None: all are tokens).
    """

    def __init__(
        self,
        model: ModelConfig,
        compute: ComputeConfig,
        rollout: RolloutConfig,
        eos_id: int,
        placement: Placement | None = None,
        known: int | None = None,
    ):
        self.model_config, self.compute, self.config, self.eos_id, self.placement = (
            model,
            compute,
            rollout,
            eos_id,
            placement,
        )
        self.layout = decode_layout(compute)
        check_pages(rollout, self.slot_groups)
        self.model = Transformer(model, compute, self.layout, placement, known)

    def _settings(self):
        return self.model, self.config, self.eos_id

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
        size = self.config.prompt_buckets[-1]
        if length <= size:
            return self.bucket(length)
        while size < length:
            size *= 2
        return min(size, self.config.max_length)

    def _lay(self, x: Array, *axes: str | None) -> Array:
        """`x` on the mesh, by its first axes; the others are whole."""
        return constrain(self.placement, x, *axes, *(None,) * (x.ndim - len(axes)))

    def _lay_state(self, state: DecodeState) -> DecodeState:
        """A state as it lies between calls: slots over the mesh, heads of the cache over tensor."""
        if self.placement is None:
            return state
        cache = self._lay_cache(state.cache, self.config.slots)
        return jax.tree.map(lambda x: self._lay(x, "batch"), state._replace(cache=None))._replace(
            cache=cache
        )

    def _lay_cache(self, cache: Cache, rows: int) -> Cache:
        """A cache of so many slots or prompts on the mesh: its rows, or its pages with their slots,
        over the devices, its heads over tensor.
        """
        if self.placement is None:
            return cache
        _, specs = pages_spec(self.placement, rows, cache)
        return jax.tree.map(
            lambda x, spec: jax.lax.with_sharding_constraint(x, self.placement.sharding(*spec)),
            cache,
            specs,
        )

    @partial(jax.jit, static_argnums=0)
    def init_decode_state(self) -> DecodeState:
        """An empty state: no slot is live."""
        n, t, wide = self.config.slots, self.config.max_length, at_least_float32(self.compute.dtype)
        cache, table = new_cache(self.model_config, self.config, self.compute, self.slot_groups)
        state = DecodeState(
            cache=cache,
            table=table,
            tokens=jnp.zeros((n, t), jnp.int32),
            logp=jnp.zeros((n, t), wide),
            entropy=jnp.zeros((n, t), wide),
            routing=empty_routes(self.model_config, n, t),
            lengths=jnp.ones((n,), jnp.int32),
            limits=jnp.ones((n,), jnp.int32),
            keys=jnp.zeros((n, 2), jnp.uint32),
            live=jnp.zeros((n,), bool),
            temperature=jnp.zeros((n,), jnp.float32),
        )
        return self._lay_state(state)

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
        temperature: Float[Array, "p"] | None = None,
        routing: UInt[Array, "p t l k"] | None = None,
    ) -> Prefix:
        """`p` prompts padded to one bucket, run once for all their samples; `rng` has one key per
        sample (`sample_keys`).

        `temperature` of each prompt's samples belongs to a `per_request` sampler: ValueError for
        one without the other. `routing`: recorded routes of the tokens (of samples that go on,
        say), live where unset.
        """
        if rng.shape[1] != num_samples:
            raise ValueError(
                f"rng has keys for {rng.shape[1]} samples, num_samples = {num_samples}"
            )
        sampler = sampler or self.default_sampler()
        if sampler.per_request != (temperature is not None):
            raise ValueError(
                "a per_request sampler needs the temperature of each prompt, and no other takes"
                " them"
            )
        return self._prefill(params, padded_tokens, true_length, rng, sampler, temperature, routing)

    def default_sampler(self) -> Sampler:
        """The sampler of the rollout configuration."""
        return Sampler(self.config.temperature, self.config.top_k, self.config.top_p)

    @partial(jax.jit, static_argnums=(0, 5))
    def _prefill(self, params, tokens, lengths, keys, sampler, temperature, routing) -> Prefix:
        p, s = keys.shape[:2]
        last, cache, routing = self._encode(params, tokens, lengths, routing)
        logits = self._lay(logits_of(last, head_weights(params)), "batch")
        each = None if temperature is None else _for_samples(temperature, s)
        first = sample(
            _for_samples(logits, s),
            keys.reshape(p * s, 2),
            _for_samples(lengths, s),
            sampler,
            each,
            self.model.known,
        )
        return Prefix(
            cache, tokens, lengths, routing, keys, *(x.reshape(p, s) for x in first), temperature
        )

    def _encode(self, params, tokens, lengths, routing):
        """(hidden state of each prompt's last token, cache, routing), by pieces of `prefill_chunk`
        tokens: attention scores are of one piece.
        """
        p, t = tokens.shape
        size = min(t, self.config.prefill_chunk)
        n = -(-t // size)

        def pieces(x):
            """[p t ...] -> [n p size ...]"""
            x = jnp.pad(x, ((0, 0), (0, n * size - t), *((0, 0),) * (x.ndim - 2)))
            return jnp.moveaxis(x.reshape(p, n, size, *x.shape[2:]), 1, 0)

        def piece(carry, inputs):
            cache, last = carry
            i, tokens, routing = inputs
            positions = jnp.broadcast_to(
                i * size + jnp.arange(size, dtype=jnp.int32)[None], (p, size)
            )
            out = apply(
                self.model,
                params,
                tokens,
                positions,
                mask=positions < lengths[:, None],
                cache=cache,
                routing=routing,
            )
            at = jnp.maximum(lengths - 1, 0) - i * size
            here = jnp.take_along_axis(
                out.hidden, jnp.clip(at, 0, size - 1)[:, None, None], axis=1
            )[:, 0]
            return (out.cache, jnp.where((at // size == 0)[:, None], here, last)), out.routing

        cache = self._lay_cache(
            init_cache(self.model_config, p, n * size, self.compute, self.config.kv_quantize), p
        )
        start = cache, jnp.zeros((p, self.model_config.hidden), self.compute.dtype_of("stream"))
        inputs = (
            jnp.arange(n, dtype=jnp.int32),
            pieces(tokens),
            None if routing is None else pieces(routing),
        )
        if n == 1:  # no loop: a scan of one is compiled as a loop
            (cache, last), used = piece(start, jax.tree.map(lambda x: x[0], inputs))
            return last, self._lay_cache(cache, p), used
        (cache, last), used = jax.lax.scan(piece, start, inputs)
        used = (
            None
            if used is None
            else jnp.moveaxis(used, 0, 1).reshape(p, n * size, *used.shape[3:])[:, :t]
        )
        return last, self._lay_cache(jax.tree.map(lambda x: x[..., :t, :], cache), p), used

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
        state, (p, s), t = decode_state, slots.shape, prefix.tokens.shape[1]
        flat = slots.reshape(p * s)
        to = jnp.where(flat < 0, self.config.slots, flat)  # out of range: dropped
        source = _for_samples(jnp.arange(p), s)

        def rows(buffer, new):
            return buffer.at[to].set(new.astype(buffer.dtype), mode="drop")

        def window(buffer, new):
            return buffer.at[to, :t].set(
                jnp.take(new, source, axis=0).astype(buffer.dtype), mode="drop"
            )

        lengths = jnp.take(prefix.lengths, source)
        token, logp, entropy = (
            x.reshape(p * s) for x in (prefix.first_token, prefix.first_logp, prefix.first_entropy)
        )

        def first(buffer, new):
            return buffer.at[to, lengths].set(new.astype(buffer.dtype), mode="drop")

        most = jnp.full(prefix.lengths.shape, self.config.max_new_tokens, jnp.int32)
        most = most if max_new_tokens is None else jnp.clip(max_new_tokens, 1, most)
        limits = lengths + jnp.take(most, source)
        state = state._replace(
            cache=put_prefix(state.cache, state.table, prefix.cache, source, to, self.placement),
            tokens=first(window(state.tokens, prefix.tokens), token),
            logp=first(
                rows(state.logp, jnp.zeros((p * s, state.logp.shape[1]), state.logp.dtype)), logp
            ),
            entropy=first(
                rows(
                    state.entropy, jnp.zeros((p * s, state.entropy.shape[1]), state.entropy.dtype)
                ),
                entropy,
            ),
            routing=(
                None
                if state.routing is None
                else window(self._forget(state.routing, to), prefix.routing)
            ),
            lengths=rows(state.lengths, lengths + 1),
            limits=rows(state.limits, limits),
            keys=rows(state.keys, prefix.keys.reshape(p * s, 2)),
            live=rows(state.live, (token != self.eos_id) & (lengths + 1 < limits)),
            temperature=(
                state.temperature
                if prefix.temperature is None
                else rows(state.temperature, jnp.take(prefix.temperature, source))
            ),
        )
        return self._lay_state(state)

    def _forget(self, routing, slots):
        """A new sequence must not inherit the routes of the slot's previous one: its rows start
        unset.
        """
        empty = jnp.array(unset_id(routing.dtype), routing.dtype)
        return routing.at[slots].set(
            jnp.broadcast_to(empty, (slots.shape[0], *routing.shape[1:])), mode="drop"
        )

    def generate(
        self,
        params,
        decode_state: DecodeState,
        sampler: Sampler | None = None,
        *,
        read: int | None = None,
        wanted_free: int | None = None,
    ) -> tuple[DecodeState, Int[Array, ""]]:
        """Decodes up to `tokens_per_call` tokens in every live slot; returns the state and the
        number of steps taken.

        Stops early when no slot is live, or when `wanted_free` slots are free (None: never). `read`
        bounds the cache positions that attention reads; it must cover the longest live sequence
        plus tokens_per_call.
        """
        wanted = jnp.int32(self.config.slots + 1 if wanted_free is None else wanted_free)
        # the kernel reads no more than each sequence has
        read = None if self.in_place(decode_state) else read
        return self._generate(params, decode_state, wanted, sampler or self.default_sampler(), read)

    def in_place(self, state: DecodeState) -> bool:
        """Whether decoding reads and writes the cache where it lies, by the kernel; else `generate`
        works on a copy of what it may read.
        """
        return attention_kernel(self.compute) == "splash" and takes_kernel(
            state.cache[0], state.table is not None
        )

    @partial(jax.jit, static_argnums=(0, 4, 5), donate_argnums=2)
    def _generate(self, params, state: DecodeState, wanted_free, sampler, read):
        n, slots = self.config.tokens_per_call, self.config.slots
        moe = self.model_config.moe if state.routing is not None else None
        outputs = {
            "tokens": jnp.zeros((n, slots), jnp.int32),
            "logp": jnp.zeros((n, slots), state.logp.dtype),
            "entropy": jnp.zeros((n, slots), state.entropy.dtype),
            "wrote": jnp.zeros((n, slots), bool),
        }
        if moe is not None:
            outputs["routing"] = jnp.full(
                (n, slots, *state.routing.shape[2:]),
                unset_id(state.routing.dtype),
                state.routing.dtype,
            )
        current = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]

        def go_on(carry):
            i, live = carry[0], carry[3]
            count = jnp.sum(live, dtype=jnp.int32)
            return (i < n) & (count > 0) & (slots - count < wanted_free)

        def body(carry):
            i, cache, lengths, live, current, outputs = carry
            step = apply(
                self.model,
                params,
                current[:, None],
                lengths[:, None] - 1,
                mask=live[:, None],
                cache=cache,
                table=pages,
            )
            logits = self._lay(logits_of(step.hidden[:, 0], head_weights(params)), "batch")
            each = state.temperature if sampler.per_request else None
            token, logp, entropy = sample(
                logits, state.keys, lengths, sampler, each, self.model.known
            )
            new = {"tokens": token, "logp": logp, "entropy": entropy, "wrote": live}
            if moe is not None:
                new["routing"] = step.routing[:, 0]
            outputs = {
                name: jax.lax.dynamic_update_index_in_dim(buffer, new[name], i, 0)
                for name, buffer in outputs.items()
            }
            lengths = lengths + live.astype(jnp.int32)
            live = live & (token != self.eos_id) & (lengths < state.limits)
            return i + 1, step.cache, lengths, live, token, outputs

        in_place = self.in_place(state)
        pages = state.table if in_place else None
        size = self.config.max_length if read is None else read
        cache = state.cache if in_place else window(state.cache, state.table, size, self.placement)
        steps, cache, lengths, live, _, outputs = jax.lax.while_loop(
            go_on, body, (jnp.int32(0), cache, state.lengths, state.live, current, outputs)
        )
        inputs = state.lengths[None, :] - 1 + jnp.arange(n, dtype=jnp.int32)[:, None]
        cache = (
            cache
            if in_place
            else put_back(state.cache, state.table, cache, inputs, outputs["wrote"], self.placement)
        )
        return (
            self._lay_state(
                self._write_back(state, outputs)._replace(cache=cache, lengths=lengths, live=live)
            ),
            steps,
        )

    def _write_back(self, state: DecodeState, outputs) -> DecodeState:
        """Scatters a call's `[steps slots]` outputs to the slots' rows; a live slot advances one
        position per step.
        """
        n, slots = outputs["tokens"].shape
        slot = jnp.broadcast_to(jnp.arange(slots)[None], (n, slots))
        position = state.lengths[None, :] + jnp.arange(n, dtype=jnp.int32)[:, None]
        # out of range: dropped
        position = jnp.where(outputs["wrote"], position, self.config.max_length + 1)

        def put(buffer, name, shift=0):
            return buffer.at[slot, position - shift].set(
                outputs[name], mode="drop", unique_indices=True
            )

        # row t belongs to token t as an input
        routing = None if state.routing is None else put(state.routing, "routing", 1)
        written = {name: put(getattr(state, name), name) for name in ("tokens", "logp", "entropy")}
        return state._replace(**written, routing=routing)

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def free_resource(self, slot: Int[Array, ""], decode_state: DecodeState) -> DecodeState:
        """Gives a slot up; what it generated is forgotten."""
        return self._lay_state(decode_state._replace(live=decode_state.live.at[slot].set(False)))

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def harvest(
        self,
        state: DecodeState,
        store: UInt[Array, "rows t l k"] | None,
        slots: Int[Array, "n"],
        rows: Int[Array, "n"],
    ):
        """(tokens, logp, entropy) `[n t]` of finished slots for the host; their routing is copied
        on the device to rows of `store`.

        `rows` out of range are not stored.
        """
        out = tuple(
            jnp.take(x, slots, axis=0, mode="clip")
            for x in (state.tokens, state.logp, state.entropy)
        )
        if store is not None:
            store = self._lay(
                store.at[rows].set(
                    jnp.take(state.routing, slots, axis=0, mode="clip"), mode="drop"
                ),
                "batch",
            )
        return out, store

    @partial(jax.jit, static_argnums=(0, 3))
    def stored_routes(
        self, store: UInt[Array, "rows t l k"], rows: Int[Array, "n"], length: int
    ) -> UInt[Array, "n length l k"]:
        """The routes of the first `length` tokens of `rows`; unset for rows out of range."""
        return jnp.take(
            store[:, :length], rows, axis=0, mode="fill", fill_value=unset_id(store.dtype)
        )

    def adopt(self, store: UInt[Array, "rows t l k"] | None) -> UInt[Array, "rows t l k"] | None:
        """A store from elsewhere (a checkpoint), on the devices that sample."""
        return (
            store
            if store is None or self.placement is None
            else move(store, self.placement.rows(store.shape[0]))
        )

    @partial(jax.jit, static_argnums=(0, 1))
    def new_store(self, rows: int) -> UInt[Array, "rows t l k"] | None:
        """Room for the routing of `rows` sequences, unset; None for a dense model."""
        store = empty_routes(self.model_config, rows, self.config.max_length)
        return None if store is None else self._lay(store, "batch")


def _for_samples(x: Array, s: int) -> Array:
    """`x` `[p ...]` of prompts for each of their `s` samples, `[p*s ...]`."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], s, *x.shape[1:])).reshape(-1, *x.shape[1:])
