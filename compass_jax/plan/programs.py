"""The programs of a run on devices that are not here: those that the engine and the learner list,
in the shapes and layouts that the run would give them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from compass_jax.chips import CHIPS, Chip, chip_of
from compass_jax.config import ConfigError, RunConfig
from compass_jax.config.curriculum import largest_stage
from compass_jax.experience.evaluate import evaluation_uses
from compass_jax.experience.programs import training_use
from compass_jax.extras import how_to_install
from compass_jax.model.params import decode_shardings, in_layout, placed_structs, training_layout
from compass_jax.model.quantize import kind_for
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.programs import Program, struct
from compass_jax.records import TrainState
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.programs import sampling_programs
from compass_jax.session import load_tokenizer
from compass_jax.sharding import Placement, make_mesh, placements
from compass_jax.tasks.task import talks
from compass_jax.training import optim
from compass_jax.training.programs import training_programs
from compass_jax.weights.sync import resolve, sync_program

# What is alive while a program runs and is not its own, by the first word of its name (`resident`);
# beside these the rollout has its "store" of routes, and the training the routes that it replays.
ROLLOUT = {
    "slots": ("state", "decode"),
    "store": ("state", "decode"),
    "prefill": ("state", "slots"),
    "insert": ("state", "decode"),
    "stored": ("state", "slots", "decode"),
    "resume": ("state", "slots"),
    "decode": ("state",),
    "harvest": ("state", "decode"),
    "free": ("state", "decode"),
    "taken": ("state", "decode"),
}
TRAINING = {
    "hand-over": ("moments",),
    "prepare": ("state", "decode"),
    "replayed": ("state", "decode", "sum"),
    "forward": ("moments", "decode", "sum"),
    "reference": ("state", "decode", "sum"),
    "recorded": ("state", "decode", "sum"),
    "objective": ("state", "decode", "sum"),
    "backward": ("moments", "decode", "sum"),
    "add": ("state", "decode"),
    "apply": ("decode",),
}
_OWN = {"store", "stored", "harvest", "taken"}, {"replayed", "recorded"}  # routes are arguments


def beside(config: RunConfig, program: Program) -> set[str]:
    """The parts of `resident` that lie on a program's devices while it runs."""
    kind, rl, apart = program.name.split()[0], config.rl, config.rollout_apart
    samples = kind in ROLLOUT
    parts = {*(ROLLOUT if samples else TRAINING)[kind]}
    if not (apart and samples):
        parts.add("reference")
    if kind not in _OWN[0] and (samples or rl.one_step_off or rl.partial_prompts):
        parts.add("store")
    if kind not in _OWN[1] and (not samples or rl.one_step_off):
        parts.add("replayed")
    if not apart:
        return parts
    return parts - ({"state", "replayed"} if samples else {"store", "decode", "slots"})


def run_programs(
    config: RunConfig,
    engine: Engine,
    model: Transformer,
    state: TrainState,
    stored: bool,
) -> Iterator[Program]:
    """Every large program of a run: those that the weight sync, the engine and the learner list.

    stored: 8-bit weights as values and scales, not emulated. `state` is of structs.
    """
    dtype, quantize = config.rollout_compute.dtype, config.rollout.quantize
    sync = sync_program(
        state.params,
        config.model,
        dtype,
        resolve(quantize),
        stored,
        placement=engine.placement,
        layout=engine.layout,
    )
    yield sync
    uses = (training_use(engine, config.rl, talks(config.data)), *evaluation_uses(config))
    yield from sampling_programs(engine, sync, uses)
    yield from training_programs(config, model, state)


def planned(programs: Iterator[Program]) -> list[Program]:
    """Of programs that differ in size alone the largest, which comes last. Evaluation decodes as
    training does, but for the sampler: that is compiled once.
    """
    found: dict[str, Program] = {}
    for program in programs:
        kind, *use = program.name.split()
        if kind not in ("decode", "harvest") or not use:
            found.pop(program.name, None)
            found[program.name] = program
    return list(found.values())


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
            f" tpu7x:4x4x4, and the compiler comes with {how_to_install('plan', 'jax', 'libtpu')}"
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
    order of `programs`: later ones take the layouts that earlier ones give their results. Of a run
    in stages it is the one whose rollouts are the largest.
    """

    def __init__(self, config: RunConfig, devices: list[jax.Device]):
        self.chip = known_chip(devices)
        self.config = config = for_chip(largest_stage(config), devices[0].device_kind)
        self.train, self.decode = _placements(config, devices)
        layout, known = training_layout(config.compute), known_ids(config)
        self.model = Transformer(config.model, config.compute, layout, self.train, known)
        self.engine = Engine(
            config.model, config.rollout_compute, config.rollout, 0, self.decode, known
        )
        self.state = fresh_state(config, self.model)
        given = (config, self.engine, self.model, self.state)
        self.programs = planned(run_programs(*given, stored=True))
        self.results: dict[Program, Any] = {}  # what compiled programs give, as structs

    def done(self, program: Program, compiled: jax.stages.Compiled) -> None:
        """Keeps the shapes and layouts of what a compiled program gives, for those after it."""
        found = jax.tree.map(_laid, compiled.out_info, compiled.output_shardings)
        # it was cut on the training's devices, and is copied to the rollout's
        if program.name == "hand-over" and self.config.rollout_apart:
            there = decode_shardings(found, self.config.model, self.decode, self.engine.layout)
            found = jax.tree.map(_laid, found, there)
        self.results[program] = found

    def result(self, name: str) -> Any:
        """What the program of this name gives; None where it is not compiled yet."""
        return next((x for program, x in self.results.items() if program.name == name), None)

    def training(self) -> list[Program]:
        """The programs of every bucket, the longest first, with what comes before them."""
        names = ("prepare", "replayed", "forward", "objective", "backward")
        return [x for x in self.programs if x.name.split()[0] in names]


def fresh_state(config: RunConfig, model: Transformer) -> TrainState:
    """The structs of a train state before the first update, laid out as `model` has it."""

    def fresh() -> TrainState:
        params = init_params(config.model, config.compute, jax.random.key(0))
        return optim.init_state(in_layout(params, model.layout), config.rl.optim, 1)

    return placed_structs(jax.eval_shape(fresh), config.model, model.placement)


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


def _laid(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return struct(x.shape, x.dtype, sharding)
