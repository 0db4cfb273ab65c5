"""The programs of one RL step, lowered for devices that are not here, with the shapes and layouts
that the run would give them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from compass_jax.chips import CHIPS, Chip, chip_of
from compass_jax.config import ConfigError, RunConfig
from compass_jax.model.moe import empty_routes
from compass_jax.model.params import (
    decays,
    decode_shardings,
    in_layout,
    placed_structs,
    training_layout,
)
from compass_jax.model.quantize import kind_for
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.records import TrainState
from compass_jax.rl.bucketing import row_counts
from compass_jax.rollout.engine import Engine
from compass_jax.sharding import Placement, make_mesh, placements
from compass_jax.train import optim, step
from compass_jax.train.session import load_tokenizer
from compass_jax.weights.sync import converter, near

# first words of the names of what the rollout's devices run
SAMPLING = ("slots", "prefill", "insert", "resume", "decode")


class Program(NamedTuple):
    """One program: `lower` gives what the compiler takes. `beside` names what else is on its
    devices while it runs (`resident`).
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    beside: tuple[str, ...]
    tokens: int  # that one run of it takes in, all devices together


def topology_devices(name: str) -> list[jax.Device]:
    """The devices of "v5p:4x4x4" and its like, none of which is here. ConfigError for a name that
    the TPU's compiler does not know.
    """
    from jax.experimental import topologies

    # otherwise a host has a square of four
    single = {"chips_per_host_bounds": [1, 1, 1]} if re.fullmatch(r"[^:]+:1(x1)*", name) else {}
    try:
        return list(topologies.get_topology_desc(name, platform="tpu", **single).devices)
    except Exception as error:  # whatever it is, it is about the name, or about libtpu
        raise ConfigError(
            f"--topology {name}: {_first_line(error)}; names are like v5p:4x4x4, v6e:16x16,"
            " tpu7x:4x4x4, and the compiler comes with pip install 'compass_jax[plan]'"
        ) from error


def known_chip(devices: list[jax.Device]) -> Chip:
    """The peaks of its chips, or ConfigError."""
    if chip := chip_of(devices[0].device_kind):
        return chip
    raise ConfigError(
        f"no peaks are known of {devices[0].device_kind}; known are"
        f" {', '.join(x.name for x in CHIPS)}"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def for_chip(config: RunConfig, kind: str) -> RunConfig:
    """`config` with what a run decides by its devices decided for another kind of them."""
    compute = config.compute
    compute = dataclasses.replace(
        compute,
        experts="ragged" if compute.experts == "auto" else compute.experts,
        attention="splash" if compute.attention == "auto" else compute.attention,
    )
    quantize = kind_for(kind) if config.rollout.quantize == "auto" else config.rollout.quantize
    return dataclasses.replace(
        config, compute=compute, rollout=dataclasses.replace(config.rollout, quantize=quantize)
    )


def known_ids(config: RunConfig) -> int:
    """Ids that the run's tokenizer has: the LM head's other columns are masked.

    Where its folder is not here, one less than the head has: most published heads are padded, and
    the mask costs the same whatever it covers.
    """
    if (Path(config.data.tokenizer or "-") / "tokenizer.json").is_file():
        return load_tokenizer(config).vocab_size
    return config.model.vocab_size - 1


class Step:
    """The abstract arrays of a run on `devices`, and its programs. Programs are compiled in the
    order of `programs()`: later ones take the layouts that earlier ones give their results."""

    def __init__(self, config: RunConfig, devices: list[jax.Device]):
        self.chip = known_chip(devices)
        self.config = config = for_chip(config, devices[0].device_kind)
        self.train, self.decode = _placements(config, devices)
        self.model = Transformer(
            config.model,
            config.compute,
            training_layout(config.compute),
            self.train,
            known_ids(config),
        )
        self.engine = Engine(
            config.model, config.rollout_compute, config.rollout, 0, self.decode, self.model.known
        )
        fresh = jax.eval_shape(self._fresh_state)
        self.state: TrainState = placed_structs(fresh, config.model, self.train)
        # of earlier rounds
        kept = config.rl.prompts_per_step if config.rl.zero_variance.dynamic_sampling else 0
        rows = (config.rl.prompts_per_round + kept) * config.rl.capacity
        self.store = jax.eval_shape(
            lambda: empty_routes(config.model, rows, config.rollout.max_length)
        )
        # it lies over the rollout's rows, and then over training's: counted where it is cut less
        if self.store is not None:
            self.store = _laid(
                self.store,
                min(self.train, self.decode, key=lambda x: x.size(*x.batch_axes(rows))).rows(rows),
            )
        apart = config.rollout_apart
        self.convert = converter(
            config.model,
            near(self.state.params, self.decode) if apart else self.decode,
            config.rollout_compute.dtype,
            config.rollout.quantize,
            True,
            self.decode.size("tensor"),
            self.engine.layout,
            None if apart else self.train.mesh,
        )
        sampler = jax.eval_shape(self.convert, self.state.params)
        self.sampler = jax.tree.map(
            _laid, sampler, decode_shardings(sampler, config.model, self.decode, self.engine.layout)
        )
        self.results: dict[str, Any] = {}  # what compiled programs give, as structs

    def _fresh_state(self) -> TrainState:
        config = self.config
        params = in_layout(
            init_params(config.model, config.compute, jax.random.key(0)), self.model.layout
        )
        return optim.init_state(params, config.rl.optim, 1)

    def done(self, program: Program, compiled: jax.stages.Compiled) -> None:
        """Keeps the shapes and layouts of a compiled program's results for the programs
        behind it.
        """
        # from the training's devices to the rollout's
        copied = program.name == "hand-over" and self.config.rollout_apart
        self.results[program.name] = (
            self.sampler
            if copied
            else jax.tree.map(_laid, compiled.out_info, compiled.output_shardings)
        )

    def programs(self) -> Iterator[Program]:
        """In an order in which each finds the results that it needs; whoever iterates calls `done`
        for each.
        """
        config, params = self.config, self.state.params
        yield self._on_training(
            "hand-over", lambda: self.convert.lower(params), ("moments", "store")
        )
        yield self._on_rollout(
            "slots",
            lambda: Engine.init_decode_state.lower(self.engine),
            ("state", "store", "decode"),
        )
        rollout, samples = config.rollout, config.rl.group_size
        prompts, bucket = -(-rollout.slots // samples), rollout.prompt_buckets[-1]
        yield self._on_rollout(
            "prefill",
            partial(self._prefill, prompts, samples, bucket),
            ("state", "store", "slots"),
            prompts * bucket,
        )
        yield self._on_rollout(
            "insert",
            partial(self._insert, "prefill", prompts, samples),
            ("state", "store", "decode"),
        )
        # samples that go on after a preemption, or in another step
        if rollout.cache_pages or config.rl.partial_prompts:
            rows, longest = max(1, rollout.slots // 8), rollout.max_length
            yield self._on_rollout(
                "resume",
                partial(self._prefill, rows, 1, longest, True),
                ("state", "slots"),
                rows * longest,
            )
            yield self._on_rollout(
                "insert resumed",
                partial(self._insert, "resume", rows, 1),
                ("state", "store", "decode"),
            )
        yield self._on_rollout("decode", self._generate, ("state", "store"), rollout.slots)
        yield from self.training()
        yield self._on_training("add", self._add, ("state", "store", "decode"))
        yield self._on_training("apply", self._apply, ("store", "decode"))

    def _on_training(
        self,
        name: str,
        lower: Callable[[], jax.stages.Lowered],
        beside: tuple[str, ...],
        tokens: int = 0,
    ) -> Program:
        gone = ("decode", "slots") if self.config.rollout_apart else ()
        return Program(name, lower, (*(x for x in beside if x not in gone), "reference"), tokens)

    def _on_rollout(
        self,
        name: str,
        lower: Callable[[], jax.stages.Lowered],
        beside: tuple[str, ...],
        tokens: int = 0,
    ) -> Program:
        if self.config.rollout_apart:
            return Program(name, lower, tuple(x for x in beside if x != "state"), tokens)
        return Program(name, lower, (*beside, "reference"), tokens)

    def training(self) -> Iterator[Program]:
        """Forward and backward of every bucket, the longest first."""
        for length in reversed(self.config.rl.buckets):
            count = row_counts(length, self.config.rl.micro_batch_tokens, self.train.rows_multiple)[
                0
            ]
            beside = "moments", "store", "decode", "sum"
            yield self._on_training(
                f"forward {length}", partial(self._forward, count, length), beside, count * length
            )
            yield self._on_training(
                f"backward {length}", partial(self._backward, length), beside, count * length
            )

    # ---- each program ----------------------------------------------------------------------------

    def _prefill(self, prompts: int, samples: int, bucket: int, replayed: bool = False):
        everywhere = self.decode.sharding()
        tokens, lengths = (
            _struct((prompts, bucket), jnp.int32, everywhere),
            _struct((prompts,), jnp.int32, everywhere),
        )
        keys = _struct((prompts, samples, 2), jnp.uint32, everywhere)
        routing = None
        if replayed and self.store is not None:
            routing = _struct((prompts, *self.store.shape[1:]), self.store.dtype, everywhere)
        return Engine._prefill.lower(
            self.engine,
            self.results["hand-over"],
            tokens,
            lengths,
            keys,
            self.engine.default_sampler(),
            None,
            routing,
        )

    def _insert(self, prefix: str, prompts: int, samples: int):
        everywhere = self.decode.sharding()
        slots = _struct((prompts, samples), jnp.int32, everywhere)
        most = _struct((prompts,), jnp.int32, everywhere)
        return Engine.bulk_insert.lower(
            self.engine, self.results[prefix], self.results["slots"], slots, most
        )

    def _generate(self):
        wanted, rollout = _struct((), jnp.int32, self.decode.sharding()), self.config.rollout
        read = None  # else the longest part of the cache that is a copy: the whole is none
        if (
            not self.engine.in_place(self.results["slots"])
            and rollout.max_length > rollout.cache_bucket
        ):
            read = rollout.max_length - rollout.cache_bucket
        return Engine._generate.lower(
            self.engine,
            self.results["hand-over"],
            self.results["slots"],
            wanted,
            self.engine.default_sampler(),
            read,
        )

    def _forward(self, rows: int, length: int):
        here, model = self.train, self.config.model
        tokens, lengths = (
            _struct((rows, length), jnp.int32, here.sharding()),
            _struct((rows,), jnp.int32, here.sharding()),
        )
        routing = None
        if self.config.rl.replay != "off" and self.store is not None:
            shape = rows, length, len(model.moe_layers), model.moe.top_k
            routing = _struct(
                shape,
                self.store.dtype,
                here.sharding(*here.spec(shape, ("batch", "tokens", None, None))),
            )
        temperature = self.config.rollout.temperature
        return step.forward_and_pullback.lower(
            self.model, self.state.params, tokens, lengths, routing, temperature
        )

    def _backward(self, length: int):
        (logp, _, _, aux), pullback = self.results[f"forward {length}"]
        return step.pull.lower(
            self.model, self.state.params, pullback, (logp, None if aux is None else aux.probs)
        )

    def _grads(self) -> Any:
        return self.results[f"backward {self.config.rl.buckets[-1]}"]

    def sum_of_gradients(self) -> Any:
        """What gradients add up to: each as its gradient lies, in at least float32."""
        return jax.tree.map(
            lambda x: _struct(x.shape, jnp.promote_types(x.dtype, jnp.float32), x.sharding),
            self._grads(),
        )

    def _add(self):
        return step.accumulate.lower(self.sum_of_gradients(), self._grads())

    def _apply(self):
        return step.apply.lower(
            self.state,
            self.sum_of_gradients(),
            config=self.config.rl.optim,
            total_steps=1,
            decays=decays(self.config.model, self.model.layout),
        )


def _placements(config: RunConfig, devices: list[jax.Device]) -> tuple[Placement, Placement]:
    """Training's and the rollout's, together on all `devices`: a part of them would leave the rest
    of what is paid for idle.
    """
    rollout = config.rollout_mesh or config.mesh
    takes = config.mesh.devices + (rollout.devices if config.rollout_apart else 0)
    if takes != len(devices):
        what = "mesh and rollout_mesh have" if config.rollout_apart else "mesh has"
        change = (
            "lower an axis, or name a larger topology"
            if takes > len(devices)
            else "raise an axis, or name a smaller topology"
        )
        raise ConfigError(f"{what} {takes} devices, the topology {len(devices)}: {change}")
    train, decode = placements(config.mesh, config.rollout_mesh, config.rollout_apart, devices)
    if train is None or decode is None:
        mesh = make_mesh(config.mesh, devices)
        return Placement(mesh), Placement(mesh, "decode")
    return train, decode


def bytes_per_device(tree: Any) -> int:
    """Of structs that have shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * _itemsize(x.dtype)
        for x in jax.tree.leaves(tree)
    )


def _itemsize(dtype) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.dtype(dtype).itemsize


def _struct(shape: tuple[int, ...], dtype, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _laid(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return _struct(x.shape, x.dtype, sharding)
