"""Settings by their dotted names: the one function that changes a configuration.

The command line, `compass_jax.train(settings=...)`, YAML and JSON files, presets and a resumed run
call `apply`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from compass_jax.base.aliases import Hint, Json, JsonMapping, JsonObject, Settings
from compass_jax.config import named
from compass_jax.config.advantage import Advantage
from compass_jax.config.correction import Correction
from compass_jax.config.drafts import Drafts
from compass_jax.config.errors import ConfigError
from compass_jax.config.foreign import suggestion
from compass_jax.config.io import KIND, NAME, decode, flatten, is_removed
from compass_jax.config.mesh import MeshConfig
from compass_jax.config.objective import Objective
from compass_jax.config.predictor import Predictor
from compass_jax.config.ranges import Section, check_fields, field_hints
from compass_jax.config.router import Router
from compass_jax.config.run import RunConfig
from compass_jax.config.seam import Seam, seam_class
from compass_jax.config.step_policy import StepPolicy

SEAMS: tuple[type[Seam], ...] = (
    Objective,
    Advantage,
    Correction,
    StepPolicy,
    Predictor,
    Drafts,
    Router,
)
_SEAMS = {base.key: base for base in SEAMS}
PRESET = "preset"
NO_SETTINGS: JsonMapping = MappingProxyType({})
# found by name, since it computes with objectives, which import this package
_WITH_PRESET = "compass_jax.training.presets:with_preset"


def apply(config: RunConfig, settings: JsonMapping) -> RunConfig:
    """Returns `config` with settings by their dotted names, with "-" or "_": {"rl.steps": 4,
    "data.sources.0.repeat": 2}. A value may be a mapping of further names.

    A class is set by its name ({"rl.objective": "dapo"}), or switched off by "none"; "preset" is
    one of presets.PRESETS. The order of `settings` does not matter: the rollout's settings are
    applied first, because a preset reads them, then the preset, classes and single settings.

    Raises ConfigError for an unknown setting, with the nearest ones, and for a value of the wrong
    type or out of its range.
    """
    named_settings, hints = flat_settings(settings), field_hints(RunConfig)
    sections = {key: getattr(config, key) for key in hints}
    for name in sorted(named_settings, key=_rank):
        try:
            key, section = _changed_section(sections, name, named_settings[name], hints)
        except _NoSuchSetting:
            known = [x for key, section in sections.items() for x in flatten(section, key)]
            hint = suggestion(name, known)
            message = f"{name[:200]}: no such setting" + (f"; {hint}" if hint else "")
            raise ConfigError(message) from None
        sections[key] = section
    changed = dataclasses.replace(config, **sections)
    check_fields(changed, "")
    return changed


class _NoSuchSetting(Exception):
    pass


def flat_settings(settings: JsonMapping) -> JsonObject:
    """Returns the settings of a run, some of which are mappings of sections, by their dotted
    names with "_".
    """
    return dict(_named(settings, RunConfig, ""))


def _named(settings: JsonMapping, section: Hint, prefix: str) -> Iterator[tuple[str, Json]]:
    for key, value in settings.items():
        name = prefix + str(key).replace("-", "_")
        inner = _section(section, name.removeprefix(prefix).split("."))
        if name.removesuffix(f".{NAME}") in _SEAMS:
            name = name.removesuffix(f".{NAME}")
        if isinstance(value, Mapping) and name in _SEAMS:
            yield from ((name if part == NAME else f"{name}.{part}", value[part]) for part in value)
        elif isinstance(value, Mapping) and inner and KIND not in value:
            yield from _named(value, inner, f"{name}.")
        else:
            yield name, value


def _section(section: Hint, path: list[str]) -> Hint:
    """Returns the class of the section at `path` inside a section; None if the path leads to a
    value, to a choice of several classes, or nowhere.
    """
    for part in path:
        section = field_hints(section).get(part) if section else None
        is_section = isinstance(section, type) and issubclass(section, Section)
        section = section if is_section else None
    return section


def _rank(name: str) -> int:
    """Returns the place of a setting in the order in which they are applied. The objective is the
    first class, since its recipes change the others.
    """
    if name.startswith("rollout."):
        return 0
    order = [PRESET, *_SEAMS]
    return 1 + (order.index(name) if name in order else len(order))


def _changed_section(
    sections: JsonObject, name: str, value: Json, hints: JsonObject
) -> tuple[str, Any]:
    """Returns the name and the new value of the section that a setting changes. Raises
    _NoSuchSetting, and ConfigError for a class that cannot be used.
    """
    rl, rollout = sections["rl"], sections["rollout"]
    if name == PRESET:
        with_preset = named.load(_WITH_PRESET, PRESET)
        return "rl", with_preset(rl, rollout, decode(value, str, name))
    if name in _SEAMS and not isinstance(value, Seam):
        base, word = _SEAMS[name], decode(value, str | None, name)
        if word is not None and word in base.recipes:  # changes more settings of RL
            recipe = named.load(base.recipes[word], base.key)
            return "rl", recipe(rl, rollout.max_new_tokens)
        if base is Router and sections["model"].moe is None:
            raise ConfigError(f"{name} = {word}: the model is dense and has no router")
        off = word in (None, "none") and base in (StepPolicy, Drafts)
        value = None if off else seam_class(base, str(word))()
    key, *inner = name.split(".")
    if key not in hints:
        raise _NoSuchSetting
    section = sections[key]
    if key == "rollout_mesh" and section is None and inner:
        section = MeshConfig()
    return key, _changed(section, inner, value, hints[key], name)


def _changed(part: Any, path: list[str], value: Json, hint: Hint, name: str) -> Any:
    """Returns `part`, of the type `hint`, with `value` at `path`; `name` is the whole setting."""
    if not path:
        return decode(value, hint, name)
    key, *inner = path
    if isinstance(part, tuple) and key.isdecimal() and int(key) < len(part):
        i = int(key)
        entry = _changed(part[i], inner, value, type(part[i]), name)
        return (*part[:i], entry, *part[i + 1 :])
    cls: Settings = type(part)
    hints = field_hints(cls) if dataclasses.is_dataclass(part) else {}
    if is_removed(cls, key, value, name):
        return part
    if key not in hints:
        raise _NoSuchSetting
    changed = _changed(getattr(part, key), inner, value, hints[key], name)
    return dataclasses.replace(part, **{key: changed})
