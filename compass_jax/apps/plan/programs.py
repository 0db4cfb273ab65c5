"""The programs of a run for devices that are not attached: those that the engine and the learner
list, in the run's shapes and layouts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

import jax

from compass_jax.base.aliases import Tree
from compass_jax.base.extras import how_to_install
from compass_jax.base.programs import Program, struct
from compass_jax.base.records import TrainState
from compass_jax.config import (
    ComputeConfig,
    ConfigError,
    DataConfig,
    LearnerConfig,
    ModelConfig,
    OptimConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    ScoredConfig,
)
from compass_jax.config.curriculum import largest_stage
from compass_jax.config.lora import LoRAConfig
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.devices.chips import CHIPS, Chip, chip_of
from compass_jax.devices.sharding import Placement, make_mesh, placements
from compass_jax.experience.evaluate import evaluation_uses
from compass_jax.experience.programs import training_use
from compass_jax.model.params import (
    decode_shardings,
    in_layout,
    placed_structs,
    training_layout,
)
from compass_jax.model.quantize import kind_for
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.rewards.tasks.task import talks
from compass_jax.rollout.draft_engine import engine_for
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.programs import sampling_programs
from compass_jax.rollout.remote.requests import most_samples
from compass_jax.training import optim, trained
from compass_jax.training.programs import training_programs
from compass_jax.weights.sync import resolve, sampler_weights, samplers_program, sync_program

# The processes whose programs are planned: those that do everything, or with samplers those of the
# training or of one sampler.
Role = Literal["all", "training", "sampler"]

# Arrays of other programs that are live while a program runs, by the first word of its name
# (`resident`). The rollout's "store" of routes and training's replayed routes come on top.
ROLLOUT = {
    "slots": ("state", "decode"),
    "store": ("state", "decode"),
    "prefill": ("state", "slots"),
    "insert": ("state", "decode"),
    "stored": ("state", "slots", "decode"),
    "resume": ("state", "slots"),
    "extend": ("state",),
    "drafts": ("state", "slots"),
    "decode": ("state",),
    "harvest": ("state", "decode"),
    "free": ("state", "decode"),
    "taken": ("state", "decode"),
}
TRAINING = {
    "hand-over": ("moments",),
    "prepare": ("state", "decode"),
    "prepared": ("state", "decode", "sum"),
    "mismatch": ("state", "decode", "sum"),
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


def live_parts(
    program: Program, rl: SamplingConfig, disaggregated: bool, role: Role = "all"
) -> set[str]:
    """Returns the parts of `resident` that are on a program's devices while it runs.
    `disaggregated`: the rollout has other devices than the training.
    """
    kind = program.name.split()[0]
    samples = kind in ROLLOUT
    parts = {*(ROLLOUT if samples else TRAINING)[kind]}
    if not (disaggregated and samples):
        parts.add("reference")
    if kind not in _OWN[0] and (samples or rl.one_step_off or rl.policy.carries):
        parts.add("store")
    if kind not in _OWN[1] and (not samples or rl.one_step_off):
        parts.add("replayed")
    if not disaggregated:
        return parts
    if samples:
        return (parts | {"next"}) - {"state", "replayed"}
    # The training keeps its decoding copy for samplers that join.
    return parts - {"store", "slots", "decode" if role == "all" else ""}


def run_programs(
    policy: PolicyConfig,
    scored: ScoredConfig,
    learner: LearnerConfig,
    engine: Engine,
    model: Transformer,
    state: TrainState,
    stored: bool,
) -> Iterator[Program]:
    """Yields every large program of a run, or with samplers of its training: those of weight sync,
    the engine and the learner.

    Args:
        state: structs of the train state.
        stored: whether 8-bit weights are values and scales, or emulated.
    """
    dtype, quantize = policy.rollout_compute.dtype, resolve(policy.rollout.quantize)
    params = model_params(policy.lora, model, state)
    arguments, layout = (params, policy.model, dtype, quantize, stored), engine.layout
    if policy.samplers.acts:
        yield samplers_program(*arguments, mesh=policy.sampling_mesh, layout=layout)
    else:
        sync = sync_program(*arguments, placement=engine.placement, layout=layout)
        yield sync
        use = training_use(engine, learner.sampling, talks(scored.data))
        evaluation = evaluation_uses(scored.evaluation, scored.data, scored.rollout)
        yield from sampling_programs(engine, sync, (use, *evaluation))
    yield from training_programs(learner, model, state, params)


def sampler_programs(
    lockstep: bool, scored: ScoredConfig, sampling: SamplingConfig, engine: Engine, sync: Program
) -> Iterator[Program]:
    """Yields the engine's programs in one of a run's samplers, given the one that makes its
    weights. A sampler has the routes of unfinished samples alone.
    """
    use = training_use(engine, sampling, talks(scored.data))
    rows = most_samples(scored.rollout.slots, sampling.capacity)
    use = dataclasses.replace(
        use,
        rows=rows if use.rows else 0,
        rows_together=0,
        goes_on=use.goes_on or not lockstep,
    )
    evaluation = evaluation_uses(scored.evaluation, scored.data, scored.rollout)
    yield from sampling_programs(engine, sync, (use, *evaluation))


def planned(programs: Iterator[Program]) -> list[Program]:
    """Keeps the largest of programs that differ in size only, which comes last. Evaluation decodes
    like training except for the sampler, so its decode program is dropped.
    """
    programs_by_name: dict[str, Program] = {}
    for program in programs:
        kind, *use = program.name.split()
        if kind not in ("decode", "harvest") or not use:
            # Removed first, so that the program takes the position of its last occurrence.
            programs_by_name.pop(program.name, None)
            programs_by_name[program.name] = program
    return list(programs_by_name.values())


def topology_devices(name: str) -> list[jax.Device]:
    """Returns the devices of a topology. Raises ConfigError for an unknown name."""
    from jax.experimental import topologies

    # The default is four chips a host.
    single = {"chips_per_host_bounds": [1, 1, 1]} if re.fullmatch(r"[^:]+:1(x1)*", name) else {}
    try:
        return list(topologies.get_topology_desc(name, platform="tpu", **single).devices)
    except Exception as error:  # of many types, all about the name or libtpu
        raise ConfigError(
            f"--topology {name}: {_first_line(error)}; names are like v5p:4x4x4, v6e:16x16,"
            f" tpu7x:4x4x4, and the compiler comes with {how_to_install('plan', 'jax', 'libtpu')}"
        ) from error


def known_chip(devices: list[jax.Device]) -> Chip:
    """Returns the peaks of the devices' chip. Raises ConfigError for an unknown chip."""
    if chip := chip_of(devices[0].device_kind):
        return chip
    raise ConfigError(
        f"no peaks are known of {devices[0].device_kind}; known are"
        f" {', '.join(x.name for x in CHIPS)}"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def for_chip(
    compute: ComputeConfig, rollout: RolloutConfig, kind: str
) -> tuple[ComputeConfig, RolloutConfig]:
    """Resolves the settings that a run chooses by its device for another kind of device."""
    compute = dataclasses.replace(
        compute,
        experts="ragged" if compute.experts == "auto" else compute.experts,
        attention="splash" if compute.attention == "auto" else compute.attention,
    )
    quantize = kind_for(kind) if rollout.quantize == "auto" else rollout.quantize
    return compute, dataclasses.replace(rollout, quantize=quantize)


def known_ids(data: DataConfig, model: ModelConfig) -> int:
    """Returns the number of ids in the run's tokenizer; the LM head's other columns are masked.

    Without the tokenizer's folder it is one less than the head's columns: most published heads are
    padded, and the mask costs the same whatever it covers.
    """
    if (Path(data.tokenizer or "-") / "tokenizer.json").is_file():
        return load_tokenizer(data, model.vocab_size).vocab_size
    return model.vocab_size - 1


class Step:
    """The abstract arrays of a run on `devices`, and its programs. Programs compile in the order of
    `programs`, since later ones take the layouts of earlier results. For a run in stages, the stage
    with the largest rollouts is used.

    Args:
        sampler: whether `devices` are those of a sampler. Those of a run with samplers are
            otherwise its training's.

    Raises ConfigError for an unknown chip, and for a mesh that does not divide the devices or the
    model.
    """

    def __init__(self, config: RunConfig, devices: list[jax.Device], sampler: bool = False):
        self.chip, self.devices = known_chip(devices), len(devices)
        rl, rollout = largest_stage(config.rl, config.rollout)
        compute, rollout = for_chip(config.compute, rollout, devices[0].device_kind)
        config = dataclasses.replace(config, rl=rl, rollout=rollout, compute=compute)
        self.config, self.policy = config, config.policy
        self.role: Role = "training" if config.samplers.acts else "all"
        if sampler:
            self.role = "sampler"
        self.train, self.decode = _placements(self.policy, devices, self.role)
        layout, known = training_layout(compute), known_ids(config.data, config.model)
        self.model = Transformer(config.model, compute, layout, self.train, known)
        # That of the training with samplers samples nowhere.
        placement = None if self.role == "training" else self.decode
        settings = config.model, self.policy.rollout_compute, rollout, 0, placement, known
        self.engine = engine_for(rl.drafts, *settings)
        self.results: dict[Program, Tree] = {}  # results of compiled programs, as structs
        self.programs = planned(self._sampler() if sampler else self._run())

    @cached_property
    def state(self) -> TrainState:
        """The structs of the train state."""
        return fresh_state(self.model, self.config.lora, self.config.rl.optim)

    def _run(self) -> Iterator[Program]:
        settings = self.policy, self.config.scored, self.config.learner
        return run_programs(*settings, self.engine, self.model, self.state, stored=True)

    def _sampler(self) -> Iterator[Program]:
        """Yields the programs of a sampler, whose weights are another process's result."""
        config, engine = self.config, self.engine
        dtype, quantize = engine.compute.dtype, config.rollout.quantize
        synced = Program("hand-over", None, ())
        self.results[synced] = sampler_weights(
            config.model, dtype, quantize, True, self.decode, engine.layout
        )
        settings = config.samplers.lockstep, config.scored, config.rl.sampling
        return sampler_programs(*settings, engine, synced)

    def done(self, program: Program, compiled: jax.stages.Compiled) -> None:
        """Stores the shapes and layouts of a compiled program's results for later programs."""
        results = jax.tree.map(_laid, compiled.out_info, compiled.output_shardings)
        # It was sharded on the training devices and is copied to the rollout's.
        if program.name == "hand-over" and self.config.rollout_apart:
            shardings = decode_shardings(
                results, self.config.model, self.decode, self.engine.layout
            )
            results = jax.tree.map(_laid, results, shardings)
        self.results[program] = results

    def result(self, name: str) -> Tree:
        """Returns the result of the program with this name; None before it is compiled."""
        return next((x for program, x in self.results.items() if program.name == name), None)

    def training(self) -> list[Program]:
        """Returns the programs of every bucket, the longest first, with their predecessors."""
        names = ("prepare", "replayed", "forward", "prepared", "objective", "backward")
        return [x for x in self.programs if x.name.split()[0] in names]


def fresh_state(model: Transformer, lora: LoRAConfig, config: OptimConfig) -> TrainState:
    """Returns the structs of a train state before the first update, in the layout of `model`."""

    def fresh() -> TrainState:
        key = jax.random.key(0)
        params = in_layout(init_params(model.config, model.compute, key), model.layout)
        tree, _ = trained.split(lora, model, params, key)
        return optim.init_state(tree, config, 1)

    return placed_structs(jax.eval_shape(fresh), model.config, model.placement)


def model_params(lora: LoRAConfig, model: Transformer, state: TrainState) -> Tree:
    """Returns the structs of the model's parameters, with those of adapters in their places."""
    if not lora.acts:
        return state.params
    base = jax.eval_shape(
        lambda: in_layout(init_params(model.config, model.compute, jax.random.key(0)), model.layout)
    )
    frozen = placed_structs(base, model.config, model.placement)
    return trained.full(lora, state.params, frozen)


def _placements(
    policy: PolicyConfig, devices: list[jax.Device], role: Role
) -> tuple[Placement, Placement]:
    """Returns the placements of training and rollout; together they use all `devices`. Training or
    a sampler alone has both on its own devices.
    """
    rollout = policy.sampling_mesh
    mesh = rollout if role == "sampler" else policy.mesh
    takes = mesh.devices + (rollout.devices if policy.rollout_apart else 0)
    if takes != len(devices):
        what = "rollout_mesh has" if mesh is policy.rollout_mesh else "mesh has"
        if policy.rollout_apart:
            what = "mesh and rollout_mesh have"
        change = (
            "lower an axis, or name a larger topology"
            if takes > len(devices)
            else "raise an axis, or name a smaller topology"
        )
        raise ConfigError(f"{what} {takes} devices, the topology {len(devices)}: {change}")
    of_rollout = policy.rollout_mesh if role == "all" else mesh
    train, decode = placements(mesh, of_rollout, policy.rollout_apart, devices)
    if train is None or decode is None:
        one = make_mesh(mesh, devices)
        return Placement(one), Placement(one, "decode")
    return train, decode


def _laid(x: Tree, sharding: Tree) -> jax.ShapeDtypeStruct:
    return struct(x.shape, x.dtype, sharding)
