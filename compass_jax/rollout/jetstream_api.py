"""An adapter of the engine for JetStream's orchestrator and gRPC server (google-jetstream 0.2.2),
which drive the batcher. Only this file imports jetstream.

JetStream assigns slots, and ends a request when its slot returns no token in a call. The batcher
has separate slots: a request runs in any of them or waits for pages, and a call decodes until every
unfinished request has a token to return. So pages and preemption work as in a rollout. JetStream's
engines have neither samplers nor request ids, so the sampler and the seed are fixed, and the k-th
prefill of a process has the k-th key. Prompts are tokenised without a chat template.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

if "tree_map" not in vars(jax):  # JetStream's orchestrator calls it; current JAX does not have it
    vars(jax)["tree_map"] = jax.tree.map

from jetstream.core import config_lib, server_lib
from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2

from compass_jax.base.aliases import Tree
from compass_jax.base.records import Prompt
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.batcher import Batcher
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.request import Request
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.rollout.sizes import prompt_bucket

# JetStream pads a request's tokens to one of these
PREFILL_LENGTHS = tuple(2**n for n in range(4, 16))


@dataclass
class Held:
    """A request in one of JetStream's slots, with its number of returned tokens."""

    request: Request
    delivered: int = 0

    @property
    def ready(self) -> int:
        """Number of generated tokens that have not been returned."""
        return len(self.request.tokens) - len(self.request.prompt.tokens) - self.delivered

    def next(self) -> tuple[int, int, int]:
        """Returns (the next token, 1, its number from 1 on), or (0, 0, ...) after the last token.

        JetStream compares the number with the request's limit before it takes the token.
        """
        valid = self.ready > 0
        place = len(self.request.prompt.tokens) + self.delivered
        token = int(self.request.tokens[place]) if valid else 0
        self.delivered += valid
        return token, int(valid), self.delivered + (not valid)


class Served:
    """JetStream's decode state: the batcher, and the request in each of JetStream's slots."""

    def __init__(self, batcher: Batcher, slots: int):
        self.batcher = batcher
        self.slots: list[Held | None] = [None] * slots

    @property
    def lacking(self) -> bool:
        """Whether an unfinished request has no token to return."""
        return any(x and not x.request.is_finished and not x.ready for x in self.slots)


class JetStreamEngine:
    """`engine` with its weights and tokenizer, in the form that JetStream's orchestrator calls.
    Other attributes (sizes, mesh) are those of `engine`.

    A call returns one token of each slot, however many the engine decodes together. Raises
    ValueError if the longest prompt bucket is not one of JetStream's lengths, which would kill its
    prefill thread.
    """

    def __init__(
        self, engine: Engine, params: Tree, tokenizer: Tokenizer, sampler: Sampler | None = None
    ):
        if engine.max_prefill_length not in PREFILL_LENGTHS:
            raise ValueError(
                f"the longest prompt bucket, {engine.max_prefill_length}, must be a power of two"
                " from 16 to 32768 for JetStream"
            )
        self._engine, self._params, self._tokenizer = engine, params, tokenizer
        self._sampler = sampler
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Tree:
        return getattr(self._engine, name)

    def load_params(self, *args: Any, **kwargs: Any) -> Tree:
        """Returns the engine's weights."""
        return self._params

    def prefill(
        self,
        *,
        params: Tree,
        existing_prefix: Request | None = None,
        padded_tokens: np.ndarray,
        true_length: int,
    ) -> Request:
        """Returns a request for the tokens of `existing_prefix` and then these, which the batcher
        prefills when it enters a slot.

        Starts no program, because two threads that start programs on one mesh can deadlock. Raises
        ValueError for another prefix, and for a prompt that is longer than the longest bucket.
        """
        tokens = np.asarray(padded_tokens, np.int32)[:true_length]
        if existing_prefix is not None:
            if not isinstance(existing_prefix, Request):
                raise ValueError("existing_prefix must be what `prefill` returned")
            tokens = np.concatenate([existing_prefix.prompt.tokens, tokens])
        prompt_bucket(self._engine.config, len(tokens))
        prompt = Prompt(next(self._numbers), 0, "", "", tokens, "")
        return Request.of(prompt, 0, 0, len(tokens) + self._engine.config.max_new_tokens, 0)

    def insert(self, prefix: Request, decode_state: Served, slot: int) -> Served:
        """Puts the request into `slot` and cancels the one before it."""
        before = decode_state.slots[slot]
        if before is not None:
            decode_state.batcher.cancel(before.request)
        decode_state.slots[slot] = Held(prefix)
        decode_state.batcher.add([prefix])
        return decode_state

    def generate(
        self, params: Tree, decode_state: Served
    ) -> tuple[Served, engine_api.ResultTokens]:
        """Returns one token of every slot; those after a sequence's end are not valid."""
        while decode_state.lacking:
            decode_state.batcher.step()
        rows = [(0, 0, 1) if request is None else request.next() for request in decode_state.slots]
        out = engine_api.ResultTokens(
            data=np.asarray(rows, np.int32),
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=1,
        )
        return decode_state, out

    def init_decode_state(self, *args: Any, **kwargs: Any) -> Served:
        """Returns a batcher with empty slots."""
        batcher = Batcher(
            self._engine, self._params, Purpose.SERVE, 0, sampler=self._sampler, streams=True
        )
        return Served(batcher, self.max_concurrent_decodes)

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """Returns an empty description, because `build_tokenizer` returns the engine's
        tokenizer.
        """
        return tokenizer_pb2.TokenizerParameters(path="")

    def build_tokenizer(
        self, metadata: tokenizer_pb2.TokenizerParameters
    ) -> tokenizer_api.Tokenizer:
        """Returns the engine's tokenizer in JetStream's form."""
        return JetStreamTokenizer(self._tokenizer, self._engine)


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """A tokenizer in JetStream's form, which pads to the engine's buckets."""

    def __init__(self, tokenizer: Tokenizer, engine: Engine):
        self._tokenizer, self._engine = tokenizer, engine

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
        """Returns (tokens padded to a bucket, their number). A longer prompt keeps only its last
        tokens, as in JetStream's tokenizers.
        """
        ids, most = self._tokenizer.encode(s), self._engine.max_prefill_length
        if len(ids) > most:
            logging.warning("a prompt of %d tokens was cut to its last %d", len(ids), most)
            ids = ids[-most:]
        # a prefill needs a token, and an error would end the process
        ids = ids or [self._tokenizer.pad_id]
        return np.pad(
            np.asarray(ids, np.int32),
            (0, prompt_bucket(self._engine.config, len(ids)) - len(ids)),
            constant_values=self.pad_id,
        ), len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Returns the text. A token that is one byte of a longer character becomes "<0xE5>", from
        which JetStream assembles the character.
        """
        text = self._tokenizer.decode(token_ids)
        if (
            text == "\ufffd"
            and len(token_ids) == 1
            and (byte := self._tokenizer.byte_of(token_ids[0])) is not None
        ):
            return f"<0x{byte:02X}>"
        return text

    @property
    def pad_id(self) -> int:
        """Id of the padding token."""
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a turn."""
        return self._tokenizer.eos_id

    @property
    def bos_id(self) -> int:
        """Id of the token that JetStream puts before token prompts: the padding token. Whether the
        tokenizer has a token that begins a sequence is not looked at; a text prompt may spell it.
        """
        return self._tokenizer.pad_id

    @property
    def stop_tokens(self) -> set[int]:
        """The engine's end tokens; padding does not end a sequence."""
        return set(self._engine.end_ids)


def run_server(engine: JetStreamEngine, host: str, port: int) -> server_lib.JetStreamServer:
    """Starts JetStream's gRPC server over `engine` in interleaved mode, in threads of this process.
    Any error in a thread kills the process.
    """
    logging.getLogger().setLevel(logging.WARNING)  # JetStream logs every decode step to stdout
    slices = config_lib.ServerConfig(
        interleaved_slices=("device=1",), interleaved_engine_create_fns=(lambda devices: engine,)
    )
    server_lib._HOST = host  # the default listens on every interface
    return server_lib.run(port=port, config=slices, devices=jax.devices()[:1], jax_padding=False)
