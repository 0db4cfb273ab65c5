"""The continuous batcher: decides when each request enters a slot. Training, evaluation and servers
`add` requests, call `step`, and may `cancel` requests.

Decisions depend only on numbered steps (the k-th generate call) and replicated device results,
never on a clock, so all hosts of a pod decide alike.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt, UInt32

from compass_jax.base.aliases import Tree
from compass_jax.devices.sharding import fetch
from compass_jax.rollout.engine_api import ResultTokens, RolloutEngine
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.request import Columns, Request
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose, RowSampling, Sampler, sample_keys
from compass_jax.rollout.sizes import (
    prefill_rows,
    prompt_bucket,
    resume_bucket,
    resume_rows,
    share,
)
from compass_jax.rollout.slots import Slots
from compass_jax.rollout.state import Prefix
from compass_jax.rollout.stats import RolloutStats
from compass_jax.rollout.waiting import OpenPrefix, Waiting, split_cancelled

# the purpose of draws, and the number that stands for a visit in their keys
Noise = tuple[Purpose, Callable[[int], int]]


class Batcher:
    """Runs requests through the slots of an engine, and owns the engine's state and cache pages.

    One prefill serves the samples of a prompt, and prompts of one bucket share a prefill. With
    `rollout.cache_pages` a request enters a slot when enough pages are free. When pages run out,
    the youngest request is preempted and continues later. Neither order nor slot changes a sample,
    because keys belong to samples.

    Args:
        params: parameters in the engine's decode layout.
        seed: seed of every draw, together with `purpose`.
        sampler: sampler of all requests (None: the configuration's); a `per_request` one takes the
            parameters of each request.
        version: version of the sampling policy, recorded with each token.
        routes: buffer that receives a request's routes when it leaves its slot; None: routes are
            not kept.
        stats: counters to add to.
        streams: whether prompts and samples that go on are prefilled one by one, so that no first
            token waits for another prompt's, or depends in its last bit on who came with it.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        params: Tree,
        purpose: Purpose,
        seed: int,
        *,
        sampler: Sampler | None = None,
        version: int = 0,
        routes: RouteBuffer | None = None,
        stats: RolloutStats | None = None,
        streams: bool = False,
    ):
        self.engine = engine
        self.params = params
        self.purpose = purpose
        self.seed = seed
        self.sampler = sampler or engine.default_sampler()
        self.version = version
        self.routes = routes
        self.stats = RolloutStats() if stats is None else stats
        self.streams = streams
        self.slots = Slots(engine.config, engine.slot_groups)
        self._state: Tree = engine.init_decode_state(self.sampler.top_logprobs)
        self._waiting = self._new_queue()
        self._any_cancelled = False

    # ---- what its drivers call -------------------------------------------------------------------

    def add(self, requests: Sequence[Request], columns: range | None = None) -> None:
        """Queues samples of one prompt. Samples that already have tokens are prefilled singly,
        before all new ones.

        columns: sample indices for which the prefill of the new ones draws (None: one each).
        """
        self._waiting.add(requests, columns)

    def cancel(self, *requests: Request) -> None:
        """Cancels requests: the next step ends them and frees their slots and pages.
        Thread-safe.
        """
        for request in requests:
            request.cancelled = True
        self._any_cancelled = True

    def step(self) -> list[Request]:
        """Fills the slots, decodes once and gives every request in a slot its new tokens. Returns
        the finished requests, which have left their slots.
        """
        finished = self._leave_cancelled()
        # Requests in slots get their pages before waiting requests take any.
        self._make_room()
        finished += self._fill()
        if self.slots.entered:
            live = self._decode()
            done = [x for x in self.slots.entered if not live[x.slot]]
            self._harvest([(x.slot, x) for x in done])
            self._leave(done)
            finished += done
        return finished

    def renew(self, params: Tree, version: int) -> None:
        """Continues under other weights: requests in slots leave them, and are prefilled again."""
        # The new prefills replay the routes, so these are copied before the slots are reused.
        self._harvest([(request.slot, request) for request in self.slots.entered])
        for request in list(self.slots.entered):
            self._free(request.slot)
            self.slots.leave(request)
            self._waiting.resumable.append(request)
        self._waiting.reopen()
        self.params, self.version = params, version

    def forget(self, samples: Container[tuple[tuple[int, int], int]]) -> None:
        """Frees what is kept of ended samples, by prompt and column: nothing here."""

    def abort(self) -> list[Request]:
        """Returns the unfinished requests that have tokens, with the routes of each in its row."""
        entered = self.slots.entered
        self._harvest([(request.slot, request) for request in entered])
        return [*entered, *(x for x in self._waiting.resumable if x.has_tokens)]

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self.slots.entered)

    @property
    def room(self) -> int:
        """Number of free slots minus the number of waiting requests; can be negative."""
        return self.engine.config.slots - len(self.slots.entered) - len(self._waiting)

    # ---- out of slots before their end -----------------------------------------------------------

    def _free(self, slot: int) -> None:
        self._state = self.engine.free_resource(jnp.int32(slot), self._state)

    def _leave_cancelled(self) -> list[Request]:
        """Removes the cancelled requests from slots and queue and returns them."""
        if not self._any_cancelled:
            return []
        # reset first, because another thread may cancel a request meanwhile
        self._any_cancelled = False
        cancelled, _ = split_cancelled(self.slots.entered)
        for request in cancelled:
            self._free(request.slot)
        self._leave(cancelled)
        waited = self._waiting.leave_cancelled()
        for request in waited:
            request.is_finished = True
        return cancelled + waited

    def _leave(self, requests: Sequence[Request]) -> None:
        """Ends requests and frees their slots."""
        for request in requests:
            request.is_finished = True
            self.slots.leave(request)

    def _make_room(self) -> None:
        """Assigns the pages of the next call to every request in a slot; preempted requests return
        to the queue.
        """
        victims = self.slots.preempt()
        # The requests have left their slots, but the engine's state still has their routes.
        self._harvest(victims)
        for slot, request in victims:
            # victims are ordered from the youngest on, so the oldest continues first
            self._waiting.resumable.appendleft(request)
            self._free(slot)
        self.stats.preempted += len(victims)

    # ---- into slots ------------------------------------------------------------------------------

    def _fill(self) -> list[Request]:
        """Puts waiting samples into free slots: first samples that have tokens, then those of a
        subclass, then new ones. Runs a prefill when the open prefix is used up. Returns the samples
        that are finished by it.
        """
        waiting = self._waiting
        free = self.slots.free() if waiting else deque[int]()
        while free and waiting.resumable:
            if not self._resume(free):
                return []
        finished = self._fill_own(free)
        while free and (waiting.groups or waiting.opened):
            if waiting.opened is None:
                waiting.opened = self._prefill(len(free))
            entered = self._insert(waiting.opened, free)
            if not waiting.opened.waiting:
                waiting.opened = None
            if not entered:
                break
        return finished

    def _new_queue(self) -> Waiting:
        return Waiting()

    def _noise(self) -> Noise:
        """Returns the noise of the sampler's draws."""
        return self.purpose, int

    def _fill_own(self, free: deque[int]) -> list[Request]:
        """Puts samples of a subclass's own queue into slots; returns the finished ones."""
        return []

    def _insert(self, opened: OpenPrefix, free: deque[int]) -> int:
        """Puts samples of `opened` into slots and returns their number."""
        slots = np.full(opened.prefix.keys.shape[:2], -1, np.int32)
        most = np.ones(len(opened.prefix.lengths), np.int32)
        entered = 0
        while free and opened.waiting:
            row, sample = opened.waiting[0]
            if not self.slots.enter(sample, free, opened, row):
                break
            opened.waiting.popleft()
            slots[row, opened.columns[row].index(sample.column)] = sample.slot
            most[row] = sample.limit - len(sample.tokens)
            entered += 1
        if entered:
            self._bulk_insert(opened.prefix, slots, most)
        return entered

    def _bulk_insert(self, prefix: Prefix, slots: np.ndarray, most: np.ndarray) -> None:
        self._state = self.engine.bulk_insert(
            prefix, self._with_table(), jnp.asarray(slots), jnp.asarray(most)
        )

    def _prefill(self, free: int) -> OpenPrefix:
        """Prefills the next prompts of one bucket, as many as the free slots can take, in one of
        the compiled sizes.
        """
        first = self._waiting.groups[0]
        s, bucket = len(first.columns), prompt_bucket(self.engine.config, len(first.prompt.tokens))
        sizes = [1] if self.streams else prefill_rows(self.engine.config, s, bucket)
        # Rounded up: samples that find no free slot stay in the open prefix.
        most = min(-(-free // s), sizes[-1])
        prompt_groups = self._waiting.take_alike(partial(prompt_bucket, self.engine.config), most)
        rows = next(size for size in sizes if size >= len(prompt_groups))
        heads = [group.requests[0] for group in prompt_groups]
        columns = [group.columns for group in prompt_groups]
        prefix = self._run_prefill(heads, columns, (rows, bucket), None)
        waiting = deque((r, x) for r, group in enumerate(prompt_groups) for x in group.requests)
        return OpenPrefix(prefix, columns, waiting)

    def _resume(self, free: deque[int]) -> int:
        """Prefills samples that have tokens, of one length bucket, and puts them into slots.
        Returns their number.
        """
        config, resumable = self.engine.config, self._waiting.resumable
        sizes = [1] if self.streams else resume_rows(config)
        entered: list[Request] = []
        bucket = resume_bucket(config, len(resumable[0].tokens))
        for sample in list(resumable):
            fits = resume_bucket(config, len(sample.tokens)) == bucket
            # No sample overtakes one that does not fit: the order of the queue is kept.
            if not (fits and len(entered) < sizes[-1] and free and self.slots.enter(sample, free)):
                break
            resumable.popleft()
            entered.append(sample)
        if not entered:
            return 0
        size = next(size for size in sizes if size >= len(entered))
        columns = [range(x.column, x.column + 1) for x in entered]
        routes = self._stored_routes(entered, size, bucket)
        prefix = self._run_prefill(entered, columns, (size, bucket), routes)
        slots, most = np.full((size, 1), -1, np.int32), np.ones(size, np.int32)
        for i, sample in enumerate(entered):
            slots[i, 0], most[i] = sample.slot, sample.limit - len(sample.tokens)
        self._bulk_insert(prefix, slots, most)
        return len(entered)

    def _keys(
        self,
        requests: Sequence[Request],
        columns: Sequence[range],
        rows: int,
        noise: Noise | None = None,
    ) -> UInt32[Array, "rows s 2"]:
        """Returns the keys of the samples `columns` of each request, padded to `rows`; those of the
        sampler's draws unless `noise` says otherwise.
        """
        purpose, visit_of = noise or self._noise()
        s = len(columns[0])
        ids, visits = np.zeros((2, rows), np.uint32)
        each = np.zeros((rows, s), np.uint32)
        for r, x in enumerate(requests):
            ids[r], visits[r], each[r] = x.prompt.id, visit_of(x.prompt.visit), columns[r]
        keys = _jitted_keys(
            self.seed,
            purpose,
            jnp.asarray(np.repeat(ids, s)),
            jnp.asarray(np.repeat(visits, s)),
            jnp.asarray(each.reshape(-1)),
        )
        return keys.reshape(rows, s, 2)

    def _stored_routes(
        self, requests: Sequence[Request], size: int, length: int
    ) -> UInt[Array, "n t l k"] | None:
        """Returns the recorded routes of these requests, padded to `size` rows; None without a
        route buffer.
        """
        if self.routes is None or self.routes.rows is None:
            return None
        rows = self._rows(requests, size - len(requests))
        return self.engine.stored_routes(self.routes.rows, rows, length)

    def _run_prefill(
        self,
        requests: Sequence[Request],
        columns: Sequence[range],
        shape: tuple[int, int],
        routes: UInt[Array, "n t l k"] | None,
    ) -> Prefix:
        """Runs the tokens of `requests`, padded to `shape`, for the samples `columns` of each."""
        s = len(columns[0])
        tokens, lengths = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
        temperature, top_p = np.zeros((2, shape[0]), np.float32)
        top_k = np.zeros(shape[0], np.int32)
        for r, x in enumerate(requests):
            tokens[r, : len(x.tokens)], lengths[r] = x.tokens, len(x.tokens)
            temperature[r], top_k[r], top_p[r] = x.temperature, x.top_k, x.top_p
        sampling = RowSampling(*map(jnp.asarray, (temperature, top_k, top_p)))
        self.stats.prefills += 1
        self.stats.prefill_tokens += int(lengths.sum())
        return self.engine.prefill_multisampling(
            params=self.params,
            padded_tokens=jnp.asarray(tokens),
            true_length=jnp.asarray(lengths),
            sampler=self.sampler,
            rng=self._keys(requests, columns, shape[0]),
            num_samples=s,
            sampling=sampling if self.sampler.per_request else None,
            routes=routes,
        )

    # ---- decoding, and to the host ---------------------------------------------------------------

    def _with_table(self) -> Tree:
        pages = self.slots.pages
        return self._state if pages is None else self.engine.with_pages(self._state, pages.table)

    def _decode(self) -> np.ndarray:
        """Calls `generate` once and returns which slots are still live. Attention reads the cache
        up to the longest live sequence, rounded up to a bucket.
        """
        config, entered = self.engine.config, self.slots.entered
        longest = max(request.length for request in entered)
        buckets = -(-(longest + config.tokens_per_call) // config.cache_bucket)
        # slots may be empty although requests wait, for lack of pages
        empty = config.slots - len(entered)
        wants_top = any(request.logprobs for request in entered)
        self._state, new = self.engine.generate(
            self.params,
            self._with_table(),
            self.sampler,
            read=min(config.max_length, buckets * config.cache_bucket),
            wanted_free=empty + share(config) if self._waiting else None,
            top_logprobs=wants_top,
        )
        # The top log-probs are zeros if no request wants them, and are then not copied to the host.
        results: Tree = fetch(new if wants_top else dataclasses.replace(new, top=None))
        self._take(entered, results)
        self.stats.calls += 1
        self.stats.steps += int(results.steps)
        self.stats.slot_steps += int(results.steps) * config.slots
        return results.live

    def _take(self, entered: Sequence[Request], results: ResultTokens) -> None:
        """Appends the new tokens of their slots to requests."""
        assert results.logp is not None and results.entropy is not None
        data, slots = np.asarray(results.data), [request.slot for request in entered]
        valid = data[:, slice(*results.valid_idx)].astype(bool)
        arrays = data[:, slice(*results.tokens_idx)], results.logp, results.entropy
        # The tokens of all slots, one slot behind the other.
        tokens, logp, entropy = (np.asarray(x)[valid] for x in arrays)
        rows = Columns.of(tokens, logp, entropy, self.version).rows()
        counts = valid.sum(axis=1)
        ends = np.cumsum(counts)
        bounds = zip((ends - counts)[slots].tolist(), ends[slots].tolist(), strict=True)
        for request, (start, end) in zip(entered, bounds, strict=True):
            request.take(rows[start:end])
            if results.top is not None and request.logprobs:
                chosen = valid[request.slot]
                request.take_top(TopLogprobs(*(x[request.slot][chosen] for x in results.top)))
        new_tokens = int(counts[slots].sum())
        self.stats.tokens += new_tokens
        # The first column is a prefill's token.
        self.stats.live_steps += new_tokens - int(valid[slots, 0].sum())

    def _rows(self, requests: Sequence[Request], padding: int) -> Array:
        """Returns the rows of requests in the route buffer, padded by rows out of range."""
        nowhere = 0 if self.routes is None else len(self.routes)
        return jnp.asarray([x.row for x in requests] + [nowhere] * padding, jnp.int32)

    def _harvest(self, requests: Sequence[tuple[int, Request]]) -> None:
        """Copies the routes of each (slot, request) to the request's row of the route buffer, on
        the device, an eighth of the slots at a time.
        """
        if self.routes is None or self.routes.rows is None:
            return
        size = share(self.engine.config)
        for at in range(0, len(requests), size):
            part = requests[at : at + size]
            padding = size - len(part)
            slots = jnp.asarray([slot for slot, _ in part] + [0] * padding, jnp.int32)
            rows = self._rows([request for _, request in part], padding)
            self.routes.rows = self.engine.harvest(self._state, self.routes.rows, slots, rows)


_jitted_keys = jax.jit(sample_keys, static_argnums=(0, 1))
