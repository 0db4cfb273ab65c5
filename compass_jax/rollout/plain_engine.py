"""Drives an engine that has JetStream's methods and no others (engine_api.Engine), with a fallback
for each method that the batcher needs beyond them.

An engine that samples and returns tokens alone can roll out: one prefill a sample, no pages, one
group of slots. Without routes the router is replayed by R2 or not at all. Without log-probs those
of training stand in for them (records.UNKNOWN_LOGP).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, UInt32

from compass_jax.base.aliases import Tree
from compass_jax.base.records import UNKNOWN_LOGP
from compass_jax.config import ConfigError, RolloutConfig
from compass_jax.devices.sharding import Placement
from compass_jax.rollout import engine_api
from compass_jax.rollout.batcher import Batcher
from compass_jax.rollout.engine_api import ResultTokens
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose, RowSampling, Sampler

# the part of the contract that a rollout calls
_CALLED = (
    "load_params",
    "prefill",
    "insert",
    "generate",
    "init_decode_state",
    "get_prefix_destination_sharding",
    "max_concurrent_decodes",
    "samples_per_slot",
    "max_prefill_length",
)


class PlainPrefix(NamedTuple):
    """Prompts that are prefilled when their samples enter slots, once for each sample."""

    params: object
    tokens: np.ndarray  # int32 [p t]
    lengths: np.ndarray  # int32 [p]
    keys: UInt32[Array, "p s 2"]
    sampler: Sampler


@dataclass
class PlainState:
    """The engine's state, and the lengths of the sequences in its slots, on the host. Each call
    changes it.
    """

    inner: object
    lengths: np.ndarray  # int32 [slots], number of tokens so far, prompt included
    limits: np.ndarray  # length at which the sequence is cut
    live: np.ndarray  # bool: whether the sequence is unfinished


class PlainEngine:
    """`engine` with the members that the batcher needs. Other attributes are those of `engine`.

    `prefill` and `generate` are called with JetStream's arguments. Where their signatures have
    them, `prefill` also gets `sampler` (Sampler) and `rng` (the sample's key, uint32 [2]), and
    `generate` gets `sampler`. Without them the settings of the engine decide how it samples. If the
    results of `generate` have `logp`, those are the rollout's log-probs.

    Args:
        engine: an object with JetStream's contract; see `engine_api.Engine`.
        rollout: its number of slots is the engine's.
        end_ids: each ends a sequence.
        known: ids below it are tokens (None: all are).
        needs_logp: whether the run compares the engine's log-probs with training's.

    Raises ConfigError for settings that the engine cannot follow, where it returns no log-probs
    that are needed, and where it draws an id that is no token: training gives such ids no
    probability.
    """

    placement: Placement | None = None
    slot_groups = 1

    def __init__(
        self,
        engine: engine_api.Engine,
        rollout: RolloutConfig,
        end_ids: Sequence[int],
        known: int | None = None,
        needs_logp: bool = False,
    ):
        name = type(engine).__name__
        # without reading a property, which may raise NotImplementedError
        lacking = [x for x in _CALLED if inspect.getattr_static(engine, x, None) is None]
        if lacking:
            raise ConfigError(f"{name} lacks {', '.join(lacking)} of engine_api.Engine")
        self.inner, self.config, self.end_ids = engine, rollout, tuple(end_ids)
        self._known, self._needs_logp = known, needs_logp
        slots, longest = engine.max_concurrent_decodes, engine.max_prefill_length
        if rollout.slots != slots or engine.samples_per_slot != 1:
            raise ConfigError(
                f"rollout.slots = {rollout.slots}: {name} has {slots} slots of"
                f" {engine.samples_per_slot} sequences; set rollout.slots to the number of its"
                " slots, which must have one sequence each"
            )
        if rollout.prompt_buckets[-1] > longest:
            raise ConfigError(
                f"rollout.prompt_buckets = {rollout.prompt_buckets}: {name} takes prompts of at"
                f" most {longest} tokens"
            )
        if rollout.cache_pages:
            raise ConfigError(
                f"rollout.cache_pages = {rollout.cache_pages}: {name} has no pages; use 0"
            )
        self._prefill_takes = inspect.signature(engine.prefill).parameters
        self._generate_takes = inspect.signature(engine.generate).parameters

    def __getattr__(self, name: str) -> Tree:
        return getattr(self.inner, name)

    def batcher(self, params: object, purpose: Purpose, seed: int, **options: Tree) -> Batcher:
        """Returns a batcher over this engine; the arguments are those of `Batcher`."""
        return Batcher(self, params, purpose, seed, **options)

    def route_buffer(self, groups: int, size: int, keep: bool) -> RouteBuffer:
        """Returns a buffer that assigns rows and stores no routes."""
        return RouteBuffer(_no_routes, _no_routes, groups, size)

    def adopt(self, store: Array | None) -> Array | None:
        """Returns a checkpoint's store."""
        return store

    def default_sampler(self) -> Sampler:
        """Returns the sampler of the rollout configuration."""
        return Sampler(self.config.temperature, self.config.top_k, self.config.top_p)

    def init_decode_state(self, top_logprobs: int = 0) -> PlainState:
        """Returns a state without live slots. Raises ConfigError for `top_logprobs`."""
        if top_logprobs:
            raise ConfigError(f"{self._name} returns no log-probs of the likeliest tokens")
        zeros = np.zeros(self.config.slots, np.int32)
        return PlainState(self.inner.init_decode_state(), zeros, zeros.copy(), zeros.astype(bool))

    def prefill_multisampling(
        self,
        *,
        params: object,
        padded_tokens: Int[Array, "p t"],
        true_length: Int[Array, "p"],
        sampler: Sampler | None,
        rng: UInt32[Array, "p s 2"],
        num_samples: int,
        sampling: RowSampling | None = None,
        routes: object = None,
    ) -> PlainPrefix:
        """Returns the prompts, which `bulk_insert` prefills. Raises ConfigError for a sampler that
        the engine cannot follow and for tokens beyond its longest prompt.
        """
        sampler = sampler or self.default_sampler()
        if sampling is not None:
            raise ConfigError(f"{self._name} cannot sample with parameters of each request")
        if not self.takes_sampler and sampler != self.default_sampler():
            raise ConfigError(
                f"{self._name} takes no sampler, so it cannot sample with {sampler}; give its"
                " `prefill` and `generate` a parameter `sampler`"
            )
        lengths = np.asarray(true_length)
        if lengths.max() > (longest := self.inner.max_prefill_length):
            raise ConfigError(
                f"a sample of {lengths.max()} tokens is to be continued, and {self._name} prefills"
                f" at most {longest}"
            )
        tokens = np.asarray(padded_tokens)[:, : self.inner.max_prefill_length]
        return PlainPrefix(params, tokens, lengths, rng, sampler)

    def bulk_insert(
        self,
        prefix: PlainPrefix,
        decode_state: PlainState,
        slots: Int[Array, "p s"],
        max_new_tokens: Int[Array, "p"] | None = None,
    ) -> PlainState:
        """Prefills and inserts one sample after the other; a slot of -1 leaves it out."""
        state = decode_state
        most = np.full(len(prefix.lengths), self.config.max_new_tokens)
        if max_new_tokens is not None:
            most = np.clip(np.asarray(max_new_tokens), 1, most)
        for (row, sample), slot in np.ndenumerate(np.asarray(slots)):
            if slot < 0:
                continue
            one = self._prefilled(prefix, row, sample)
            if (place := self.inner.get_prefix_destination_sharding()) is not None:
                one = jax.device_put(one, place)
            state.inner = self.inner.insert(one, state.inner, int(slot))
            state.lengths[slot] = prefix.lengths[row]
            state.limits[slot] = prefix.lengths[row] + most[row]
            state.live[slot] = True
        return state

    def generate(
        self,
        params: object,
        decode_state: PlainState,
        sampler: Sampler | None = None,
        *,
        read: int | None = None,
        wanted_free: int | None = None,
        top_logprobs: bool = False,
    ) -> tuple[PlainState, ResultTokens]:
        """Calls the engine once and returns the new tokens of the live slots, each up to its end.

        The first column of the results is empty: ours has a prefill's token there.
        """
        state, options = decode_state, dict[str, object]()
        if self.takes_sampler:
            options["sampler"] = sampler or self.default_sampler()
        state.inner, out = self.inner.generate(params, state.inner, **options)
        out = out.convert_to_numpy()
        tokens, valid, _ = (np.asarray(out.data[:, slice(*x)]) for x in _columns(out))
        valid = valid.astype(bool) & state.live[:, None]
        # a sequence ends after its first end token, or at its limit
        ends = np.cumsum(np.isin(tokens, self.end_ids) & valid, axis=1)
        valid[:, 1:] &= ends[:, :-1] == 0
        valid &= state.lengths[:, None] + np.cumsum(valid, axis=1) <= state.limits[:, None]
        largest = int(np.max(tokens, where=valid, initial=-1))
        if self._known is not None and largest >= self._known:
            raise ConfigError(
                f"{self._name} drew the id {largest}, and the tokenizer has {self._known} ids; it"
                " must draw none of the LM head's other columns"
            )
        state.lengths += valid.sum(axis=1, dtype=np.int32)
        has_ended = (np.isin(tokens, self.end_ids) & valid).any(axis=1)
        state.live = state.live & ~has_ended & (state.lengths < state.limits)
        return state, self._results(out, tokens, valid, state)

    def free_resource(self, slot: Int[Array, ""], decode_state: PlainState) -> PlainState:
        """Ends the sequence in a slot. The engine decodes it on until another is inserted."""
        decode_state.live[int(slot)] = False
        return decode_state

    @property
    def takes_sampler(self) -> bool:
        """Whether it can sample by other settings than those of its engine."""
        return "sampler" in self._generate_takes

    @property
    def _name(self) -> str:
        return type(self.inner).__name__

    def _prefilled(self, prefix: PlainPrefix, row: int, sample: int) -> object:
        options: dict[str, object] = {}
        if "sampler" in self._prefill_takes:
            options["sampler"] = prefix.sampler
        if "rng" in self._prefill_takes:
            options["rng"] = prefix.keys[row, sample]
        return self.inner.prefill(
            params=prefix.params,
            padded_tokens=prefix.tokens[row],
            true_length=int(prefix.lengths[row]),
            **options,
        )

    def _results(
        self, out: ResultTokens, tokens: np.ndarray, valid: np.ndarray, state: PlainState
    ) -> ResultTokens:
        """Returns the results in the form of this package's engine."""
        m = tokens.shape[1]
        tokens, valid = (np.pad(x.astype(np.int32), ((0, 0), (1, 0))) for x in (tokens, valid))
        logp = np.full(tokens.shape, UNKNOWN_LOGP, np.float32)
        entropy = np.full(tokens.shape, np.nan, np.float32)
        for columns, name in ((logp, "logp"), (entropy, "entropy")):
            if (known := getattr(out, name, None)) is not None:
                columns[:, 1:] = known
            elif name == "logp" and self._needs_logp:
                raise ConfigError(
                    f"rl.correction compares the sampler's log-probs with training's, and"
                    f" {self._name} returns none: set rl.correction to 'off', or let `generate`"
                    " return `logp`"
                )
        data = np.concatenate([tokens, valid, state.lengths[:, None]], axis=1)
        places = (0, m + 1), (m + 1, 2 * m + 2), (2 * m + 2, 2 * m + 3)
        numbers: Tree = (data, *places, 1, logp, entropy, None, state.live.copy(), np.int32(m))
        return ResultTokens(*numbers)


def _columns(out: ResultTokens) -> tuple[tuple[int, int], ...]:
    return out.tokens_idx, out.valid_idx, out.length_idx


def _no_routes(*_: Tree) -> Tree:
    return None
