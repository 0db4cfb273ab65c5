"""The first lines of a run: model, data, devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType

import jax

from compass_jax.config import (
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RLConfig,
    RolloutConfig,
    SFTConfig,
)
from compass_jax.config.curriculum import Stage


def header(
    model: str,
    init_from: str,
    meshes: tuple[MeshConfig, MeshConfig | None],
    directory: str,
    work: str,
    done_steps: int,
    total: int,
    memory: str = "",
    method: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Returns lines of "name value".

    Args:
        model: describes the model (`describe_model`).
        meshes: of the training, and of the rollout if it has its own.
        work: describes the training data, for example "160 prompts, 40 held out".
        done_steps: steps of the run that is resumed; 0 for a new run.
        total: number of steps.
        memory: describes the estimate of the run's memory.
        method: lines on the training by their names (`rl_method`, `sft_method`).
    """
    devices = jax.devices()
    training, rollout = meshes
    where = f"{len(devices)} x {devices[0].device_kind}, {_axes(training)}"
    if rollout is not None:
        where += f"; rollout {_axes(rollout)}"
    rows = {
        "model": model,
        "weights": init_from or "random",
        "trains on": work,
        "devices": where,
        **({"memory": memory} if memory else {}),
        "directory": directory,
        **method,
        "steps": f"{done_steps} of {total} done: continues" if done_steps else f"{total}",
    }
    return [f"  {name:9}  {value}" for name, value in rows.items()]


def rl_method(rl: RLConfig, rollout: RolloutConfig) -> dict[str, str]:
    """Returns objective, size of a step and optimiser of an RL run, by the names of their lines."""
    zero = rl.zero_variance
    stages = {
        f"step policy {rl.step_policy and rl.step_policy.name}": rl.step_policy,
        f"at most {rl.policy.most_rounds(rl)} rounds of prompts": rl.policy.most_rounds(rl) > 1,
        "posterior selection": zero.posterior,
        "curriculum": zero.curriculum,
        "dynamic sampling": zero.dynamic_sampling,
        f"growth to {zero.grow_to}": zero.grow_to,
        f"RL-ZVP {zero.rl_zvp_alpha:g}": zero.rl_zvp,
        f"correction {rl.correction.name}": rl.correction.acts,
    }
    parts = [f"{rl.objective.name}, advantage {rl.advantage.name}", *filter(stages.get, stages)]
    updates = rl.updates_per_rollout * rl.epochs
    return {
        "objective": ", ".join(parts),
        "a step": f"{rl.prompts_per_step} prompts x {rl.group_size} samples of at most"
        f" {rollout.max_new_tokens} tokens, {updates} update{'s' * (updates > 1)}",
        "optimiser": describe_optimiser(rl.optim, rl.total_updates),
    }


def sft_method(sft: SFTConfig) -> dict[str, str]:
    """Returns size of a step and optimiser of SFT, by the names of their lines."""
    return {
        "a step": f"{sft.batch} rows, 1 update",
        "optimiser": describe_optimiser(sft.optim, sft.steps),
    }


def describe_optimiser(optim: OptimConfig, updates: int) -> str:
    """Returns name, learning rate, schedule, average of the weights and number of updates."""
    schedule = "constant" if optim.schedule == "constant" else f"{optim.schedule} decay to 0"
    if optim.schedule_tokens:
        schedule += f" at {optim.schedule_tokens:,} tokens"
    if optim.rate_by_groups:
        schedule += " times sqrt(varied groups / prompts)"
    warmup = f" after {optim.warmup_steps} updates of warm-up" if optim.warmup_steps else ""
    rate = f"learning rate {optim.learning_rate:g}, {schedule}{warmup}"
    average = f", weights averaged with decay {optim.average:g}" if optim.average else ""
    return f"{optim.name}, {rate}{average}; {updates} updates"


def stage_line(rl: RLConfig, rollout: RolloutConfig, stage: Stage) -> str:
    """Returns the first line of an RL stage. `rl` and `rollout` have the stage's settings."""
    mix = ", ".join(f"{share:.0%} of {low:g} to {high:g}" for low, high, share in stage.mix or ())
    return (
        f"stage {stage.number} of {stage.total} (from 0), to step {stage.end}: prompts"
        f" {f'by pass rate: {mix}' if mix else 'as they come'}; {rl.group_size} samples of at most"
        f" {rollout.max_new_tokens} tokens; {rl.objective.name}, learning rate"
        f" {rl.optim.learning_rate:g}"
    )


def describe_model(model: ModelConfig, parameters: int) -> str:
    """Returns family, number of parameters and experts."""
    kind = f"{model.family}, {_short(parameters)} parameters"
    if model.moe is not None:
        kind += f", {model.moe.experts} experts, top-{model.moe.top_k}"
    return kind


def _axes(mesh: MeshConfig) -> str:
    """Returns the mesh's axes, for example "fsdp 4, expert 2", or "one device"."""
    sizes = [(f.name, getattr(mesh, f.name)) for f in fields(mesh)]
    return ", ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one device"


def _short(count: int) -> str:
    """Returns a short number, for example 494k or 30.5B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
