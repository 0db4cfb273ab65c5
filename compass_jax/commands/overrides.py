"""Settings on the command line, such as `--rl.steps 3`, which change a configuration."""

from __future__ import annotations

import contextlib
import io
import json
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from compass_jax.aliases import Json
from compass_jax.commands.cli import tidy_help
from compass_jax.commands.settings import class_sentence, describe
from compass_jax.config import (
    ConfigError,
    Drafts,
    RLRunConfig,
    Seam,
    StepPolicy,
)
from compass_jax.config.foreign import VERL, suggestion
from compass_jax.config.io import flatten, tuples
from compass_jax.config.ranges import Section
from compass_jax.config.verifiers import Options
from compass_jax.untrusted import parse_json

R = TypeVar("R", bound=RLRunConfig)


def override(config: R, arguments: Sequence[str], prog: str = "compass") -> R:
    """Returns `config` with typed settings applied (`--rl.steps 3`, `--rl.normalize-std False`,
    `--data.sources.0.size 50`).

    Reports an unknown setting (with the nearest ones) or a value of the wrong type on stderr, and
    exits with status 2.
    """
    import tyro

    config, arguments = _with_classes(config, arguments)
    if words_of_sections(["rollout_mesh"], arguments):
        config = config.with_rollout_mesh()
    _refuse_unknown(config, arguments)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_options_as_json)
    # The configuration fixes the classes of its sources and whether there are experts.
    markers = tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff
    return tyro.cli(
        type(config),
        default=config,
        args=arguments,
        prog=prog,
        description=_about(config),
        config=markers,
        registry=registry,
    )


def settings_help(config: RLRunConfig, prog: str) -> str:
    """Returns the help text of all settings, each with its value in `config`."""
    for part in (type(config), *map(type, _seams(config))):
        describe(part)
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        override(config, ["--help"], prog)
    return tidy_help(text.getvalue())


def _about(config: RLRunConfig) -> str:
    lines = ["Settings, each with its value in this configuration."]
    for part in _seams(config):
        lines.append(
            f"--{part.key.replace('_', '-')} NAME: {class_sentence(part)} (default: {part.name})"
        )
    if config.rl.step_policy is None:
        names = ", ".join(StepPolicy.classes)
        about = f"{names}, or your own file.py:Class. (default: none, by other settings)"
        lines.append(f"--rl.step-policy NAME: Class: {about}")
    if config.rl.drafts is None:
        names = ", ".join(Drafts.classes)
        about = f"{names}, or your own file.py:Class. (default: none)"
        lines.append(f"--rl.drafts NAME: Class: {about}")
    return "\n".join(lines)


def _refuse_unknown(config: Section, arguments: Sequence[str]) -> None:
    """Raises ConfigError for an unknown setting with a known counterpart: TRL's or verl's name, or
    a name without its section. tyro reports the others.
    """
    known = flatten(config)
    for word in arguments:
        key, _, value = word.partition("=")
        is_option = key.startswith("--")
        key = key.lstrip("-").replace("-", "_")
        if key in known or not (is_option or (value and key in VERL)):
            continue
        if hint := suggestion(key, known if "." not in key else ()):
            raise ConfigError(f"{word[:80]}: no such setting; {hint}")


def _with_classes(config: R, arguments: Sequence[str]) -> tuple[R, Sequence[str]]:
    """Returns `config` with the classes that the arguments name (`with_class`), such as
    `--rl.objective NAME`, and the remaining arguments.

    The class decides which settings exist, so it is applied first.
    """
    from compass_jax.presets import SEAMS, with_class

    answer = answer_tokens(arguments) or config.rollout.max_new_tokens
    for base in SEAMS:
        name, arguments = _take(arguments, base)
        if name:
            config = with_class(config, base, name, answer)
    return config, arguments


def _seams(config: RLRunConfig) -> list[Seam]:
    """Returns the settings whose class is chosen by name."""
    rl, moe = config.rl, config.model.moe
    parts = rl.objective, rl.advantage, rl.correction, rl.step_policy, rl.drafts
    return [part for part in (*parts, moe and moe.router) if part]


def _take(arguments: Sequence[str], base: type[Seam]) -> tuple[str, list[str]]:
    """Returns the last class named by the setting of `base` (or "") and the remaining arguments."""
    flag, remaining, name = f"--{base.key}", [], ""
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option.replace("-", "_") != flag.replace("-", "_"):
            remaining.append(word)
            continue
        name = value if equals else next(words, "")
        if not name:
            raise ConfigError(f"{flag}: name a class after it")
    return name, remaining


def _options_as_json(info: Any) -> Json:
    """Lets tyro read options, whose values have many types, as JSON."""
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


def options_of(text: str) -> Options:
    """Returns the options in a JSON object, or in a list of its pairs."""
    value = parse_json(text, "options", error=ConfigError)
    return tuples([list(pair) for pair in value.items()] if isinstance(value, dict) else value)


def answer_tokens(arguments: Sequence[str]) -> int | None:
    """Returns the value of rollout.max_new_tokens among arguments; None if it is absent or is no
    positive number, which `override` reports.
    """
    value = ""
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        option, equals, text = word.partition("=")
        if option.replace("_", "-") == "--rollout.max-new-tokens":
            value = text if equals else following
    with contextlib.suppress(ValueError):
        return max(int(value), 0) or None
    return None


def words_of_sections(sections: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Returns the settings of these sections among arguments, with their values."""
    words, is_included = [], False
    for word in arguments:
        if word.startswith("--"):
            section = word[2:].partition("=")[0].partition(".")[0]
            is_included = section.replace("-", "_") in sections
        if is_included:
            words.append(word)
    return words
