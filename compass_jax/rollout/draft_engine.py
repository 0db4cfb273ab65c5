"""An engine whose samples may begin with a draft, an earlier answer to their prompt: one pass of
the model scores it, and the sample goes on after the tokens that are accepted (rollout/drafts.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from compass_jax.base.aliases import Tree
from compass_jax.base.records import Draft, SampleKey
from compass_jax.config import Drafts
from compass_jax.devices.sharding import fetch
from compass_jax.model.moe import unset_id
from compass_jax.rollout.batcher import Batcher, Noise
from compass_jax.rollout.drafts import DraftInputs, DraftRows, DraftScores
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.logprobs import in_rows
from compass_jax.rollout.prefill import encode, for_samples
from compass_jax.rollout.request import Columns, Request
from compass_jax.rollout.sampling import Purpose, Sampler, draw_uniform, sample, scaled_logits
from compass_jax.rollout.sizes import resume_bucket, resume_rows
from compass_jax.rollout.state import Prefix, lay, next_logits
from compass_jax.rollout.waiting import Waiting, split_cancelled


class DraftEngine(Engine):
    """The engine for training with `drafts`. `find` returns the draft of a sample, or None. It
    equals an Engine of its settings, so that both share compiled programs.
    """

    def __init__(
        self,
        *settings: Any,
        drafts: Drafts,
        find: Callable[[SampleKey], Draft | None],
    ):
        super().__init__(*settings)
        self.drafts, self.find = drafts, find

    def batcher(self, params: Tree, purpose: Purpose, seed: int, **options: Tree) -> Batcher:
        """Returns a batcher, with drafts for training's samples."""
        cls = DraftBatcher if purpose == Purpose.TRAIN else Batcher
        return cls(self, params, purpose, seed, **options)

    @partial(jax.jit, static_argnums=(0, 3, 4))
    def prefill_drafts(
        self, params, rows: DraftRows, sampler: Sampler, drafts: Drafts
    ) -> tuple[Prefix, DraftScores]:
        """Scores a draft of each prompt and accepts its first tokens by `drafts.accepted`.

        Returns a Prefix of one sample a prompt and the log-probs and entropies of the accepted
        tokens. The prefix holds the prompt and these tokens, their routes, and the next token,
        drawn with the sample's key. After a draft that is accepted up to an end token, or to the
        sample's limit, the next token is not part of the sample.
        """
        return _prefilled(self, params, rows, sampler, drafts)

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def store_prefix_routes(
        self, prefix: Prefix, store: UInt[Array, "rows t l k"], rows: Int[Array, "n"]
    ) -> UInt[Array, "rows t l k"]:
        """Copies the routes of each prompt of a prefix, without its last token's, to `rows` of
        `store`, and unsets the rest of the row. Rows out of range are dropped.
        """
        assert prefix.routes is not None
        n, t = prefix.tokens.shape
        # Routes belong to a sample's inputs: all its tokens but the last.
        is_input = jnp.arange(t)[None] < prefix.lengths[:, None] - 1
        unset = jnp.array(unset_id(store.dtype), store.dtype)
        routes = jnp.where(is_input[..., None, None], prefix.routes.astype(store.dtype), unset)
        routes = jnp.full((n, *store.shape[1:]), unset).at[:, :t].set(routes)
        return lay(self.placement, store.at[rows].set(routes, mode="drop"), "batch")


def engine_for(
    drafts: Drafts | None,
    *settings: Any,
    find: Callable[[SampleKey], Draft | None] = lambda key: None,
) -> Engine:
    """Returns an engine for a run's samples, with `drafts` or, for None, without."""
    if drafts is None:
        return Engine(*settings)
    return DraftEngine(*settings, drafts=drafts, find=find)


class Drafted(NamedTuple):
    """A request that waits for the pass over its draft."""

    request: Request
    draft: Draft  # within the request's limit

    @property
    def length(self) -> int:
        """The number of its tokens and those of its draft."""
        return len(self.request.tokens) + len(self.draft.tokens)


class _Queue(Waiting):
    """The queue with requests that have a draft: after those that have tokens, before new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.drafted: deque[Drafted] = deque()

    def __len__(self) -> int:
        return super().__len__() + len(self.drafted)

    def __bool__(self) -> bool:
        return super().__bool__() or bool(self.drafted)

    def take(self, bucket: Callable[[int], int], most: int) -> list[Drafted]:
        """Takes up to `most` requests with a draft from the front that have the length bucket of
        the first one.
        """
        size = bucket(self.drafted[0].length)
        chosen: list[Drafted] = []
        skipped: list[Drafted] = []
        while self.drafted and len(chosen) < most:
            x = self.drafted.popleft()
            (chosen if bucket(x.length) == size else skipped).append(x)
        self.drafted.extendleft(reversed(skipped))
        return chosen

    def leave_cancelled(self) -> list[Request]:
        """Removes the cancelled requests and returns them."""
        cancelled, active = split_cancelled(x.request for x in self.drafted)
        self.drafted = deque(x for x in self.drafted if x.request in active)
        return super().leave_cancelled() + cancelled


class DraftBatcher(Batcher):
    """A batcher whose new requests begin with a draft where the engine finds one."""

    engine: DraftEngine
    _waiting: _Queue

    def _new_queue(self) -> Waiting:
        return _Queue()

    def add(self, requests: Sequence[Request], columns: range | None = None) -> None:
        """Queues samples of one prompt, like `Batcher.add`; those with a draft singly."""
        without = []
        for request in requests:
            draft = self.engine.find(request.prompt.sample(request.column))
            if draft is None or request.has_tokens:
                without.append(request)
                continue
            most = request.limit - len(request.prompt.tokens)
            draft = Draft(draft.tokens[:most], draft.logp[:most])
            self._waiting.drafted.append(Drafted(request, draft))
        super().add(without, columns)

    def _fill_own(self, free: deque[int]) -> list[Request]:
        """Puts samples with a draft into slots; returns those that their drafts finish."""
        finished: list[Request] = []
        while free and self._waiting.drafted:
            finished += self._accept(free)
        return finished

    def _accept(self, free: deque[int]) -> list[Request]:
        """Scores drafts of one length bucket and puts the samples into slots that they leave
        unfinished; those that get no pages continue later. Returns the finished ones.
        """
        config, end_ids = self.engine.config, self.engine.end_ids
        sizes = resume_rows(config)
        drafted = self._waiting.take(partial(resume_bucket, config), min(len(free), sizes[-1]))
        requests = [x.request for x in drafted]
        bucket = resume_bucket(config, drafted[0].length)
        size = next(size for size in sizes if size >= len(requests))
        prefix, scores = self._score(drafted, (size, bucket))
        lengths, logp, entropy = fetch(scores)
        slots, most = np.full((size, 1), -1, np.int32), np.ones(size, np.int32)
        finished = []
        for i, (request, draft) in enumerate(drafted):
            start = len(request.tokens)
            new = slice(start, int(lengths[i]))
            request.drafted, request.draft_tokens = new.stop - start, len(draft.tokens)
            accepted = draft.tokens[: request.drafted]
            columns = Columns.of(accepted, logp[i, new], entropy[i, new], self.version)
            request.take(columns.rows())
            at_end = request.has_tokens and int(request.tokens[-1]) in end_ids
            if at_end or len(request.tokens) == request.limit:
                request.is_finished = True
                finished.append(request)
            elif self.slots.enter(request, free):
                slots[i, 0], most[i] = request.slot, request.limit - len(request.tokens)
            else:
                self._waiting.resumable.append(request)
        # Finished samples, and those that got no pages, have their routes in no slot.
        if self.routes is not None and self.routes.rows is not None:
            rows = self._rows(requests, size - len(requests))
            self.routes.rows = self.engine.store_prefix_routes(prefix, self.routes.rows, rows)
        self._bulk_insert(prefix, slots, most)
        return finished

    def _score(
        self, drafted: Sequence[Drafted], shape: tuple[int, int]
    ) -> tuple[Prefix, DraftScores]:
        """Runs the pass over drafts, padded to `shape`."""
        tokens, logp = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        lengths, prompts = np.zeros((2, shape[0]), np.int32)
        for r, x in enumerate(drafted):
            prompts[r], lengths[r] = len(x.request.tokens), x.length
            tokens[r, : prompts[r]] = x.request.tokens
            answer = slice(prompts[r], lengths[r])
            tokens[r, answer], logp[r, answer] = x.draft
        requests = [x.request for x in drafted]
        columns = [range(x.column, x.column + 1) for x in requests]
        rows = DraftRows(
            jnp.asarray(tokens),
            jnp.asarray(lengths),
            jnp.asarray(prompts),
            jnp.asarray(logp),
            self._keys(requests, columns, shape[0])[:, 0],
            self._keys(requests, columns, shape[0], (Purpose.ACCEPT, int))[:, 0],
        )
        self.stats.prefills += 1
        self.stats.prefill_tokens += int(lengths.sum())
        return self.engine.prefill_drafts(self.params, rows, self.sampler, self.engine.drafts)

    def _noise(self) -> Noise:
        """Coupled drafts share the noise of the draws among several visits."""
        drafts = self.engine.drafts
        if drafts.noise_visit(0) is None:
            return super()._noise()
        return Purpose.COUPLED, lambda visit: drafts.noise_visit(visit) or 0


def _prefilled(
    engine: Engine, params: Tree, rows: DraftRows, sampler: Sampler, drafts: Drafts
) -> tuple[Prefix, DraftScores]:
    """Runs prompts with a draft each. Returns the accepted prefixes as a Prefix, with the token
    that is drawn after each, and their scores.
    """
    model, t = engine.model, rows.tokens.shape[1]
    # Column i is about the token at i + 1, which the hidden state at i predicts.
    position = jnp.broadcast_to(jnp.arange(1, t + 1, dtype=jnp.int32)[None], rows.tokens.shape)

    def of_tokens(hidden, token, draft_logp, position, key, accept_key):
        """The hidden states before `n` tokens -> (accepted, logp, drawn, its logp, entropy)."""
        logits = next_logits(model, params, hidden, sampler)
        drawn, drawn_logp, entropy = sample(logits, key, position, sampler, None, model.known)
        logp = jax.nn.log_softmax(scaled_logits(logits, sampler, None, model.known), axis=-1)
        logp = jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0]
        uniform = draw_uniform(accept_key, position, logp.dtype)
        inputs = DraftInputs(token, drawn, logp, draft_logp.astype(logp.dtype), uniform)
        return drafts.accepted(inputs), logp, drawn, drawn_logp, entropy

    def of_piece(hidden, following):
        p, size = hidden.shape[:2]
        keys = (for_samples(x, size) for x in (rows.keys, rows.accept_keys))
        flat = (x.reshape(p * size, *x.shape[2:]) for x in (hidden, *following))
        return jax.tree.map(lambda x: x.reshape(p, size), in_rows(of_tokens, *flat, *keys))

    following = *(jnp.roll(x, -1, axis=1) for x in (rows.tokens, rows.draft_logp)), position
    inputs = params, rows.tokens, rows.lengths, None
    (_, cache, routes), results = encode(model, engine.config, *inputs, of_piece, following)
    accepted, logp, drawn, drawn_logp, entropy = results
    passes = accepted | (position < rows.prompts[:, None])
    # The number of columns before the first refusal. The first token of a prompt has no column.
    leading = jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    lengths = jnp.minimum(1 + leading, rows.lengths)
    if routes is not None:
        is_input = (position <= lengths[:, None])[..., None, None]
        routes = jnp.where(is_input, routes, jnp.array(unset_id(routes.dtype), routes.dtype))
    last = jnp.maximum(lengths - 1, 0)[:, None]
    first, first_logp, first_entropy = (
        jnp.take_along_axis(x, last, axis=1) for x in (drawn, drawn_logp, entropy)
    )
    keys = rows.keys[:, None]
    prefix = Prefix(cache, rows.tokens, lengths, routes, keys, first, first_logp, first_entropy)
    scores = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in (logp, entropy))
    return prefix, DraftScores(lengths, *scores)
