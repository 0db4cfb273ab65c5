"""The engine of this package: prefill, insert and generate over a DecodeState, with the methods and
signatures of JetStream's engines (engine_api.py). Its programs are pure, jitted and donate their
state.

A prefill serves all samples of its prompts: it returns a Prefix with the first token of every
sample. `bulk_insert` puts samples into slots. `generate` decodes many tokens per call on the device
and returns them. No function reads a clock or the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt, UInt32

from compass_jax.base.aliases import Tree
from compass_jax.config import ComputeConfig, ModelConfig, RolloutConfig
from compass_jax.devices.sharding import Placement, move
from compass_jax.model.attention import takes_kernel
from compass_jax.model.layer import attention_kernel
from compass_jax.model.moe import empty_routes, unset_id
from compass_jax.model.params import decode_layout, to_decode
from compass_jax.model.routes import take_routes
from compass_jax.model.transformer import Transformer
from compass_jax.rollout.batcher import Batcher
from compass_jax.rollout.decode import decoded
from compass_jax.rollout.engine_api import ResultTokens
from compass_jax.rollout.held import HoldingBatcher
from compass_jax.rollout.insert import inserted
from compass_jax.rollout.kv_cache import check_pages
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.prefill import Extension, extended, prefilled, prompt_logprobs
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose, RowSampling, Sampler, sample_keys
from compass_jax.rollout.sizes import prompt_bucket
from compass_jax.rollout.state import DecodeState, Prefix, empty_state, lay, lay_state


class Engine:
    """The sampler of one model. It holds no parameters: each call takes them in the decode layout.

    Engines of equal settings are equal, so that they share compiled programs. Each of `end_ids`
    ends a sequence. Ids below `known` are tokens; the LM head's other columns are never drawn
    (None: all are tokens).
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
        """Number of devices, or groups of devices, over which the slots are split."""
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
        """Number of sequences per slot."""
        return 1

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of its placement; without one, the first device."""
        if self.placement is not None:
            return self.placement.mesh
        return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))

    @property
    def colocated_cpus(self) -> None:
        """None: the engine names no CPU devices."""

    def get_prefix_destination_sharding(self) -> None:
        """Returns None: a prefix stays on its devices."""

    def get_tokenizer(self) -> Tree:
        """Raises NotImplementedError: the engine works on token ids (jetstream_api.py has text)."""
        raise NotImplementedError("the engine works on token ids and has no tokenizer")

    def build_tokenizer(self, metadata: Tree) -> Tree:
        """Raises NotImplementedError like `get_tokenizer`."""
        return self.get_tokenizer()

    def load_params(self, params: Tree) -> Tree:
        """Returns training parameters in the decode layout. `weights.sync` also quantizes them and
        moves them to another mesh.
        """
        parts = 1 if self.placement is None else self.placement.size("tensor")
        return to_decode(params, parts, self.layout)

    @partial(jax.jit, static_argnums=(0, 1))
    def init_decode_state(self, top_logprobs: int = 0) -> DecodeState:
        """Returns a state without live slots. top_logprobs: the sampler's."""
        return empty_state(self.model, self.config, self.slot_groups, top_logprobs)

    def prefill(
        self,
        *,
        params,
        existing_prefix: Prefix | None = None,
        padded_tokens: Int[Array, "t"],
        true_length: int,
        sampler=None,
        request_id: int = 0,
    ) -> Prefix:
        """Runs one prompt for one sample, keyed by `request_id`: the tokens of `existing_prefix`, a
        Prefix of one prompt, and then these. All of them are computed. Raises ValueError for
        another prefix, and beyond the longest bucket.
        """
        if existing_prefix is not None:
            if not (isinstance(existing_prefix, Prefix) and len(existing_prefix.lengths) == 1):
                raise ValueError("existing_prefix must be what `prefill` returned for one prompt")
            first = existing_prefix.tokens[0, : int(existing_prefix.lengths[0])]
            tokens = jnp.concatenate([first, jnp.asarray(padded_tokens)[:true_length]])
            true_length, bucket = len(tokens), prompt_bucket(self.config, len(tokens))
            padded_tokens = jnp.pad(tokens, (0, bucket - true_length))
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
        """Runs `p` prompts, padded to one bucket, once for all their samples; `rng` has one key per
        sample (`sample_keys`).

        `sampling` holds the parameters of each prompt's samples for a `per_request` sampler.
        `routes`: recorded routes of the tokens (for example of resumed samples); unset ones are
        routed live. Raises ValueError if only one of `sampling` and a `per_request` sampler is
        given.
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
        """Returns the sampler of the rollout configuration."""
        return Sampler(self.config.temperature, self.config.top_k, self.config.top_p)

    @partial(jax.jit, static_argnums=(0, 5))
    def _prefill(self, params, tokens, lengths, keys, sampler, sampling, routes) -> Prefix:
        return prefilled(
            self.model, self.config, params, tokens, lengths, keys, sampler, sampling, routes
        )

    @partial(jax.jit, static_argnums=(0, 4))
    def extend(
        self, params, decode_state: DecodeState, extension: Extension, sampler: Sampler
    ) -> Prefix:
        """Returns the Prefix of a sequence whose first tokens have their keys in a slot: only its
        new tokens are computed.
        """
        return extended(self.model, params, decode_state, extension, sampler)

    @partial(jax.jit, static_argnums=(0, 4))
    def prompt_logprobs(
        self, params, tokens: Int[Array, "1 t"], lengths: Int[Array, "1"], most: int
    ) -> TopLogprobs:
        """Returns `[t k]`: row i has the log-prob of token i of a prompt given the tokens before
        it, and those of the `most` likeliest tokens there. The first row has only the token's id.
        """
        return prompt_logprobs(self.model, self.config, params, tokens, lengths, most)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Puts the first sample of the first prompt into `slot`.

        Raises ValueError with `rollout.cache_pages`, because JetStream's callers assign no pages.
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

        `max_new_tokens` limits the samples of each prompt; it is clipped to 1 and the
        configuration's limit (None: that limit).
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
    ) -> tuple[DecodeState, ResultTokens]:
        """Decodes up to `tokens_per_call` tokens in every live slot. Returns the state and the new
        tokens; the first token of a slot is that of its prefill, if not yet reported.

        Stops early when no slot is live, or when `wanted_free` slots are free (None: never). `read`
        bounds the cache positions that attention reads; it must cover the longest live sequence
        plus tokens_per_call. `top_logprobs`: whether the results include the top log-probs of a
        state that has them.
        """
        # More than all slots are never free. An array, because every static value would compile a
        # separate program.
        free_target = jnp.int32(self.config.slots + 1 if wanted_free is None else wanted_free)
        # the kernel reads no more than each sequence has
        read = None if self.in_place(decode_state) else read
        sampler = sampler or self.default_sampler()
        if decode_state.top is None:
            return self._generate(params, decode_state, free_target, sampler, read)
        needs_top = jnp.bool_(top_logprobs)
        return self._generate(params, decode_state, free_target, sampler, read, needs_top)

    def in_place(self, state: DecodeState) -> bool:
        """Returns whether the kernel reads and writes the cache in place. Otherwise `generate`
        copies the part of the cache that it may read.
        """
        return attention_kernel(self.compute) == "splash" and takes_kernel(
            state.cache[0], state.table is not None
        )

    @partial(jax.jit, static_argnums=(0, 4, 5), donate_argnums=2)
    def _generate(self, params, state: DecodeState, wanted_free, sampler, read, needs_top=None):
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
            needs_top,
        )

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def free_resource(self, slot: Int[Array, ""], decode_state: DecodeState) -> DecodeState:
        """Ends the sequence in a slot."""
        return lay_state(
            self.placement, decode_state._replace(live=decode_state.live.at[slot].set(False))
        )

    def with_pages(self, decode_state: DecodeState, table: np.ndarray) -> DecodeState:
        """Returns the state with the pages `[slots n]` of each slot (pages.PagePool)."""
        # On a CPU the array may share NumPy's buffer, and the pool changes its table in place.
        return decode_state._replace(table=jnp.asarray(table.copy()))

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def harvest(
        self,
        state: DecodeState,
        store: UInt[Array, "rows t l k"],
        slots: Int[Array, "n"],
        rows: Int[Array, "n"],
    ) -> UInt[Array, "rows t l k"]:
        """Copies the routes of `slots` to `rows` of `store`, on the device. Rows out of range are
        dropped.
        """
        assert state.routes is not None
        slot_routes = jnp.take(state.routes, slots, axis=0, mode="clip")
        slot_routes = slot_routes.reshape(-1, *store.shape[1:])
        return lay(self.placement, store.at[rows].set(slot_routes, mode="drop"), "batch")

    @partial(jax.jit, static_argnums=(0, 3))
    def stored_routes(
        self, store: UInt[Array, "rows t l k"], rows: Int[Array, "n"], length: int
    ) -> UInt[Array, "n length l k"]:
        """Returns the routes of `rows` for the first `length` tokens, unset out of range."""
        return jnp.take(
            store[:, :length], rows, axis=0, mode="fill", fill_value=unset_id(store.dtype)
        )

    @partial(jax.jit, static_argnums=0)
    def taken_routes(
        self, store: UInt[Array, "rows t l k"], rows: Int[Array, "n"]
    ) -> UInt[Array, "n t l k"]:
        """Returns a copy of `rows`, unset for rows out of range, laid out by rows over a mesh.

        A gather from a split axis first materialises its whole result on every device, so it runs
        in turns of one row for each device.
        """
        if self.placement is None:
            return take_routes(store, rows, store.shape[1])
        axes = self.placement.batch_axes(len(rows))
        parts = self.placement.size(*axes)
        layout = self.placement.sharding(axes or None)

        def turn(some: Int[Array, "parts"]) -> UInt[Array, "parts t l k"]:
            routes = take_routes(store, some, store.shape[1])
            return jax.lax.with_sharding_constraint(routes, layout)

        turns = jax.lax.map(turn, rows.reshape(parts, -1).T)
        routes = jnp.swapaxes(turns, 0, 1).reshape(len(rows), *store.shape[1:])
        return jax.lax.with_sharding_constraint(routes, layout)

    def batcher(self, params: Tree, purpose: Purpose, seed: int, **options: Tree) -> Batcher:
        """Returns a batcher over this engine; the arguments are those of `Batcher`."""
        kind = HoldingBatcher if self.config.hold_sessions else Batcher
        return kind(self, params, purpose, seed, **options)

    def route_buffer(self, groups: int, size: int, keep: bool) -> RouteBuffer:
        """Returns a buffer for the routes of `groups` groups of up to `size` samples. Unless
        `keep` is set, it assigns rows and stores no routes.
        """
        new = self.new_routes if keep else lambda rows: None
        return RouteBuffer(new, self.taken_routes, groups, size)

    def adopt(self, store: UInt[Array, "rows t l k"] | None) -> UInt[Array, "rows t l k"] | None:
        """Returns a checkpoint's store, moved to the devices that sample."""
        return (
            store
            if store is None or self.placement is None
            else move(store, self.placement.rows(store.shape[0]))
        )

    @partial(jax.jit, static_argnums=(0, 1))
    def new_routes(self, rows: int) -> UInt[Array, "rows t l k"] | None:
        """Returns unset routes for `rows` sequences; None for a dense model."""
        store = empty_routes(self.model_config, rows, self.config.max_length)
        return None if store is None else lay(self.placement, store, "batch")
