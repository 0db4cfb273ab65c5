"""The contract between an engine and its driver: that of JetStream's engines (google-jetstream
0.2.2, `jetstream.engine.engine_api`), as protocols of this package.

`Engine` has JetStream's methods and signatures, so engines of both packages are interchangeable;
this module does not import JetStream. `RolloutEngine` adds several samples of
a prompt, pages of the cache, log-probs and routes, which a rollout needs. The batcher calls only
these methods.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32

from compass_jax.base.aliases import Tree
from compass_jax.config import RolloutConfig
from compass_jax.devices.sharding import Placement
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose, RowSampling, Sampler


class SlotData(NamedTuple):
    """The tokens that a call of `generate` drew in one slot: `[samples m]`, with `[samples]`
    lengths.
    """

    tokens: Tree
    valid: Tree
    lengths: Tree


@struct.dataclass
class ResultTokens:
    """The tokens of one call of `generate`, in JetStream's form.

    The columns of `data` are the tokens, whether each is valid, and the number of tokens of a
    sequence after its prompt. The other fields are this package's extension, None for an engine
    without them. Row i of each belongs to row i of `data`, column j to its j-th token. Routes stay
    on the device (`RolloutEngine.harvest`).
    """

    data: Int[Array, "n columns"]
    tokens_idx: tuple[int, int] = struct.field(pytree_node=False)
    valid_idx: tuple[int, int] = struct.field(pytree_node=False)
    length_idx: tuple[int, int] = struct.field(pytree_node=False)
    samples_per_slot: int = struct.field(pytree_node=False)
    logp: Float[Array, "n m"] | None = None
    entropy: Float[Array, "n m"] | None = None
    top: TopLogprobs | None = None  # [n m k], of a sampler with `top_logprobs`
    live: Bool[Array, "n"] | None = None  # whether the sequence is unfinished
    steps: Int[Array, ""] | None = None  # number of decoding steps of the call

    def copy_to_host_async(self) -> None:
        """Starts the copy of `data` to the host."""
        if isinstance(self.data, jax.Array):
            self.data.copy_to_host_async()

    def convert_to_numpy(self) -> ResultTokens:
        """Returns the same results as NumPy arrays."""
        return jax.tree.map(np.asarray, self)

    def get_result_at_slot(self, slot: int) -> SlotData:
        """Returns the tokens of all samples in `slot`."""
        rows = self.data[slot * self.samples_per_slot : (slot + 1) * self.samples_per_slot]
        tokens, valid, lengths = (
            rows[:, slice(*columns)]
            for columns in (self.tokens_idx, self.valid_idx, self.length_idx)
        )
        return SlotData(tokens, valid, lengths[:, 0])


@runtime_checkable
class Engine(Protocol):
    """The methods of JetStream's `engine_api.Engine`.

    A driver calls `prefill` on a prompt, `insert` to put the result into a slot, and `generate`
    repeatedly, which decodes all slots together.
    """

    def load_params(self, *args: Any, **kwargs: Any) -> Tree:
        """Returns the parameters in the layout that the other methods take."""

    def prefill(
        self,
        *,
        params: Tree,
        existing_prefix: Any = None,
        padded_tokens: Int[Array, "t"],
        true_length: int,
    ) -> Tree:
        """Returns the prefix of one prompt."""

    def insert(self, prefix: Tree, decode_state: Tree, slot: int) -> Tree:
        """Returns the state with the prefix in `slot`."""

    def generate(self, params: Tree, decode_state: Tree) -> tuple[Tree, ResultTokens]:
        """Decodes once in every slot; returns the state and the new tokens."""

    def init_decode_state(self, *args: Any, **kwargs: Any) -> Tree:
        """Returns a state of empty slots."""

    def get_tokenizer(self) -> Tree:
        """Returns the argument of `build_tokenizer`."""

    def build_tokenizer(self, metadata: Any) -> Tree:
        """Returns the tokenizer in JetStream's form."""

    def get_prefix_destination_sharding(self) -> Tree:
        """Returns the sharding that a prefix needs before `insert`; None: it stays on its
        devices.
        """

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""

    @property
    def samples_per_slot(self) -> int:
        """Number of sequences per slot."""

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt in tokens."""

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices of the engine."""

    @property
    def colocated_cpus(self) -> list[Tree] | None:
        """CPU devices of the accelerators' hosts, or None."""


class RolloutEngine(Engine, Protocol):
    """An engine with the optional methods that the batcher needs.

    `end_ids` end a sequence. Slots are split over `slot_groups` groups of devices, each with
    separate pages. Parameters are an argument of every call, so new weights apply from the next
    call on.
    """

    config: RolloutConfig
    end_ids: tuple[int, ...]
    placement: Placement | None  # of the routes; None: one device

    @property
    def slot_groups(self) -> int:
        """Number of groups of devices over which the slots are split."""

    def batcher(self, params: Tree, purpose: Purpose, seed: int, **options: Any) -> Tree:
        """Returns what runs requests; the arguments are those of `Batcher`."""

    def route_buffer(self, groups: int, size: int, keep: bool) -> RouteBuffer:
        """Returns a buffer for the routes of `groups` groups of up to `size` samples. Unless
        `keep` is set, it assigns rows and stores no routes.
        """

    def adopt(self, store: Array | None) -> Array | None:
        """Returns a checkpoint's routes, moved to the devices that sample."""

    def default_sampler(self) -> Sampler:
        """Returns the sampler of the rollout configuration."""

    def prefill_multisampling(
        self,
        *,
        params: Tree,
        padded_tokens: Int[Array, "p t"],
        true_length: Int[Array, "p"],
        sampler: Sampler | None,
        rng: UInt32[Array, "p s 2"],
        num_samples: int,
        sampling: RowSampling | None = None,
        routes: UInt[Array, "p t l k"] | None = None,
    ) -> Tree:
        """Runs `p` prompts once for all their samples, each with its own key in `rng`."""

    def bulk_insert(
        self,
        prefix: Tree,
        decode_state: Tree,
        slots: Int[Array, "p s"],
        max_new_tokens: Int[Array, "p"] | None = None,
    ) -> Tree:
        """Puts sample `s` of prompt `p` into `slots[p, s]`; -1 leaves it out."""

    def generate(
        self,
        params: Tree,
        decode_state: Tree,
        sampler: Sampler | None = None,
        *,
        read: int | None = None,
        wanted_free: int | None = None,
        top_logprobs: bool = False,
    ) -> tuple[Tree, ResultTokens]:
        """Decodes many tokens; see `compass_jax.rollout.engine.Engine.generate`."""

    def free_resource(self, slot: Int[Array, ""], decode_state: Tree) -> Tree:
        """Ends the sequence in `slot`."""

    def with_pages(self, decode_state: Tree, table: np.ndarray) -> Tree:
        """Returns the state with the pages that each slot may write from now on."""

    def harvest(
        self, state: Tree, store: Any, slots: Int[Array, "n"], rows: Int[Array, "n"]
    ) -> UInt[Array, "rows t l k"]:
        """Copies the routes of `slots` to `rows` of `store`, on the device."""

    def stored_routes(self, store: Any, rows: Int[Array, "n"], length: int) -> Tree:
        """Returns the routes of the first `length` tokens of `rows` of `store`."""

    def prompt_logprobs(
        self, params: Tree, tokens: Int[Array, "1 t"], lengths: Int[Array, "1"], most: int
    ) -> TopLogprobs:
        """Returns the log-probs of a prompt's tokens and of the `most` likeliest tokens at each
        position.
        """
