"""Our engine as one of JetStream's (google-jetstream 0.2.2): its orchestrator and its gRPC server
drive it. The only file that imports jetstream.

JetStream's engine returns no token from a prefill and knows neither samplers nor requests. So the
first token, which our prefill has drawn, leaves with the first `generate`, and every later call
hands out the tokens of the call before it, one behind; sampler and seed are the engine's own, and
the k-th prefill of a process has the k-th key. Text is tokenised as it comes, without a chat
template.
"""

from __future__ import annotations

import itertools
import logging
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

if "tree_map" not in vars(jax):  # JetStream's orchestrator calls it, current JAX has removed it
    jax.tree_map = jax.tree.map

from jetstream.core import config_lib, server_lib
from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.engine import DecodeState, Engine, Prefix
from compass_jax.rollout.sampling import Sampler

# JetStream pads a request's tokens to one of these
PREFILL_LENGTHS = tuple(2**n for n in range(4, 16))


class Served(NamedTuple):
    """Our decode state, and how far each slot's tokens were handed out."""

    state: DecodeState
    start: Int[Array, "slots"]  # tokens of the prompt
    given: Int[Array, "slots"]  # position of the next token to hand out


class JetStreamEngine(engine_api.Engine):
    """`engine` with its weights and tokenizer behind JetStream's interface.

    A call hands out `tokens_per_call` tokens of each slot, so that JetStream stops a request at its
    limit rounded up to a multiple of them: 1 is exact. ValueError where the longest prompt bucket
    is none of JetStream's lengths: its prefill thread would die of it.
    """

    def __init__(
        self, engine: Engine, params: Any, tokenizer: Tokenizer, sampler: Sampler | None = None
    ):
        if engine.max_prefill_length not in PREFILL_LENGTHS:
            raise ValueError(
                f"the longest prompt bucket, {engine.max_prefill_length}, must be a power of two"
                " from 16 to 32768 for JetStream"
            )
        self._engine, self._params, self._tokenizer = engine, params, tokenizer
        self._sampler = sampler or engine.default_sampler()
        self._requests = itertools.count()

    def load_params(self, *args, **kwargs) -> Any:
        """The weights that the engine was made with."""
        return self._params

    def prefill(
        self, *, params, existing_prefix=None, padded_tokens: Int[Array, "t"], true_length: int
    ) -> Prefix:
        """One prompt; its first token is drawn here and handed out by the next `generate`.
        ValueError for an `existing_prefix`.
        """
        return self._engine.prefill(
            params=params,
            existing_prefix=existing_prefix,
            padded_tokens=jnp.asarray(padded_tokens, jnp.int32),
            true_length=min(true_length, len(padded_tokens)),
            sampler=self._sampler,
            request_id=next(self._requests),
        )

    def insert(self, prefix: Prefix, decode_state: Served, slot: int) -> Served:
        """Puts the request into `slot`."""
        length = prefix.lengths[0]
        state = self._engine.insert(prefix, decode_state.state, slot)
        return Served(
            state, decode_state.start.at[slot].set(length), decode_state.given.at[slot].set(length)
        )

    def generate(self, params: Any, decode_state: Served) -> tuple[Served, engine_api.ResultTokens]:
        """`tokens_per_call` tokens of every slot; those behind a sequence's end are not valid."""
        state, _ = self._engine.generate(params, decode_state.state, self._sampler)
        n = self._engine.config.tokens_per_call
        data, given = self._hand_out(state, decode_state.start, decode_state.given)
        out = engine_api.ResultTokens(
            data=data,
            tokens_idx=(0, n),
            valid_idx=(n, 2 * n),
            length_idx=(2 * n, 2 * n + 1),
            samples_per_slot=1,
        )
        return Served(state, decode_state.start, given), out

    @partial(jax.jit, static_argnums=0)
    def _hand_out(self, state: DecodeState, start, given):
        at = (
            given[:, None]
            + jnp.arange(self._engine.config.tokens_per_call, dtype=jnp.int32)[None, :]
        )
        valid = at < state.lengths[:, None]
        tokens = jnp.where(valid, jnp.take_along_axis(state.tokens, at, axis=1, mode="clip"), 0)
        # JetStream drops a call whose length exceeds the request's limit, and looks before it takes
        # the tokens.
        length = given - start + 1
        return jnp.concatenate(
            [tokens, valid.astype(jnp.int32), length[:, None]], axis=1
        ), jnp.minimum(at[:, -1] + 1, state.lengths)

    def init_decode_state(self, *args, **kwargs) -> Served:
        """An empty state."""
        zero = jnp.zeros((self.max_concurrent_decodes,), jnp.int32)
        return Served(self._engine.init_decode_state(), zero, zero)

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """Nothing: `build_tokenizer` has the tokenizer itself."""
        return tokenizer_pb2.TokenizerParameters(path="")

    def build_tokenizer(
        self, metadata: tokenizer_pb2.TokenizerParameters
    ) -> tokenizer_api.Tokenizer:
        """The engine's tokenizer in JetStream's form."""
        return JetStreamTokenizer(self._tokenizer, self._engine)

    def get_prefix_destination_sharding(self) -> None:
        """A prefix stays where it is."""

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self._engine.max_concurrent_decodes

    @property
    def samples_per_slot(self) -> int:
        """1."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt, in tokens."""
        return self._engine.max_prefill_length

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The first device."""
        return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))

    @property
    def colocated_cpus(self) -> None:
        """None are named."""


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Our tokenizer in JetStream's form: pads to the engine's buckets, decodes one token at
    a time.
    """

    def __init__(self, tokenizer: Tokenizer, engine: Engine):
        self._tokenizer, self._engine = tokenizer, engine

    def encode(self, s: str, **kwargs) -> tuple[np.ndarray, int]:
        """(tokens padded to a bucket, how many there are). Of a longer prompt the last tokens are
        kept, as JetStream's own tokenizers do.
        """
        ids, most = self._tokenizer.encode(s), self._engine.max_prefill_length
        if len(ids) > most:
            logging.warning("a prompt of %d tokens was cut to its last %d", len(ids), most)
            ids = ids[-most:]
        # a prefill needs a token, and an error would end the process
        ids = ids or [self._tokenizer.pad_id]
        return np.pad(
            np.asarray(ids, np.int32),
            (0, self._engine.bucket(len(ids)) - len(ids)),
            constant_values=self.pad_id,
        ), len(ids)

    def decode(self, token_ids: list[int], **kwargs) -> str:
        """Text. A token that is one byte of a longer character is spelt "<0xE5>", from which
        JetStream puts the character together.
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
        """Of padding."""
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        """Of the end of a turn."""
        return self._tokenizer.eos_id

    @property
    def bos_id(self) -> int:
        """JetStream puts it before token prompts; the families here have none, so it is the padding
        token.
        """
        return self._tokenizer.pad_id

    @property
    def stop_tokens(self) -> set[int]:
        """The end token alone: padding does not end a sequence here."""
        return {self.eos_id}


def run_server(engine: JetStreamEngine, host: str, port: int) -> server_lib.JetStreamServer:
    """JetStream's gRPC server over `engine`, in interleaved mode, running in threads of this
    process, each of which kills it on any error.
    """
    logging.getLogger().setLevel(logging.WARNING)  # JetStream logs every decode step to stdout
    slices = config_lib.ServerConfig(
        interleaved_slices=("device=1",), interleaved_engine_create_fns=(lambda devices: engine,)
    )
    server_lib._HOST = host  # it would listen on every interface
    return server_lib.run(port=port, config=slices, devices=jax.devices()[:1], jax_padding=False)
