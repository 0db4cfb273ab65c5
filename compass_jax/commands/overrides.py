"""Settings on the command line, such as `--rl.steps 3`, which change a configuration."""

from __future__ import annotations

import contextlib
import io
import json
import typing
from typing import Any

from compass_jax.base.aliases import Json
from compass_jax.commands.parsing import tidy_help
from compass_jax.commands.settings import class_sentence, describe
from compass_jax.config import Drafts, ModelConfig, RLConfig, RunConfig, Seam, StepPolicy
from compass_jax.config.verifiers import Options
from compass_jax.config.words import options_of


def settings_help(config: RunConfig, prog: str) -> str:
    """Returns the help text of all settings, each with its value in `config`."""
    import tyro

    for part in (type(config), *map(type, _seams(config.rl, config.model))):
        describe(part)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_options_as_json)
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        tyro.cli(
            type(config),
            default=config,
            args=["--help"],
            prog=prog,
            description=_about(config.rl, config.model),
            # The configuration fixes the classes of its sources and whether there are experts.
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            registry=registry,
        )
    return tidy_help(text.getvalue())


def _about(rl: RLConfig, model: ModelConfig) -> str:
    lines = ["Settings, each with its value in this configuration."]
    for part in _seams(rl, model):
        lines.append(
            f"--{part.key.replace('_', '-')} NAME: {class_sentence(part)} (default: {part.name})"
        )
    if rl.step_policy is None:
        names = ", ".join(StepPolicy.classes)
        about = f"{names}, or your own file.py:Class. (default: none, by other settings)"
        lines.append(f"--rl.step-policy NAME: Class: {about}")
    if rl.drafts is None:
        names = ", ".join(Drafts.classes)
        about = f"{names}, or your own file.py:Class. (default: none)"
        lines.append(f"--rl.drafts NAME: Class: {about}")
    if not rl.hooks:
        about = "Classes of your own as file.py:Class, or a list in JSON. (default: none)"
        lines.append(f"--rl.hooks NAME ...: {about}")
    return "\n".join(lines)


def _seams(rl: RLConfig, model: ModelConfig) -> list[Seam]:
    """Returns the settings whose class is chosen by name."""
    moe = model.moe
    parts = rl.objective, rl.advantage, rl.correction, rl.step_policy, rl.predictor, rl.drafts
    return [part for part in (*parts, moe and moe.router) if part]


def _options_as_json(info: Any) -> Json:
    """Lets tyro describe options, whose values have many types, as JSON."""
    from tyro.constructors import PrimitiveConstructorSpec

    if typing.get_args(info.type) != typing.get_args(Options):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: options_of(words[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [json.dumps(value)],
    )
