"""Exact conversion of `RunConfig` to JSON and back, and differences of two configurations
by key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import typing
from pathlib import Path
from typing import Any

from compass_jax.base.aliases import Hint, Json, JsonObject, Settings
from compass_jax.base.untrusted import parse_json, read_text
from compass_jax.config.errors import ConfigError
from compass_jax.config.foreign import foreign_name
from compass_jax.config.ranges import (
    Section,
    check_fields,
    describe_value,
    field_hints,
    options,
    tuples,
)
from compass_jax.config.run import RunConfig
from compass_jax.config.seam import Seam, seam_class
from compass_jax.config.words import Words

KIND = "kind"  # the key that names the class, in a field of several dataclasses
# Settings of earlier versions: the values that switched them off, and what became of them; "": they
# had no effect.
REMOVED: dict[tuple[str, str], tuple[tuple[Json, ...], str]] = {
    ("SFTConfig", "eval_every"): ((), ""),
    ("RLConfig", "group_replay"): (
        (0, None),
        "it is the hook of examples/group_replay.py now, for rl.hooks",
    ),
    ("ZeroVarianceConfig", "select"): (
        (False,),
        "rl.zero_variance.posterior predicts the pass rates of prompts instead (skipping by streaks"
        " changed no accuracy, benchmarks/HISTORY.md); leave it out",
    ),
    ("ZeroVarianceConfig", "select_targets"): ((), ""),
    ("ZeroVarianceConfig", "grow_temperature"): (
        (1,),
        "groups grow at the temperature of the rollout now (a higher one changed no accuracy,"
        " benchmarks/HISTORY.md); leave it out",
    ),
}
NAME = "name"  # the key that names a class that may be a user's (config/seam.py)


def config_to_json(config: Section) -> str:
    """Returns the configuration as indented JSON, which `config_from_json` reads."""
    return json.dumps(to_plain(config), indent=2)


def config_from_json(text: str) -> RunConfig:
    """Returns the configuration in JSON of this version or an earlier one; absent keys take their
    defaults.

    Raises ConfigError, naming the key, for text that `untrusted.parse_json` refuses, an unknown
    key, a missing key without default, or a value of the wrong type or out of its range.
    """
    data = parse_json(text, "the configuration", error=ConfigError)
    rl = data.get("rl") if isinstance(data, dict) else None
    if isinstance(rl, dict):
        rl.setdefault("step_policy", None)  # versions without this setting had no policy
    return from_plain(RunConfig, data)


def read_config(path: str | os.PathLike) -> RunConfig:
    """Returns the configuration of a run directory. Raises ConfigError, naming the file, if it is
    absent or damaged.
    """
    file = Path(path) / "config.json"
    if not file.exists():
        raise ConfigError(f"{file} does not exist: {path} is not a run directory")
    try:
        return config_from_json(read_text(file, error=ConfigError))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def to_plain(config: Settings) -> JsonObject:
    """Returns a configuration class, or a part of one, as JSON's own types."""
    return _encode(config, type(config))


def from_plain(cls: type, data: Json) -> Json:
    """Returns the instance of the dataclass `cls` in what `to_plain` returned; raises ConfigError
    like `config_from_json`.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{cls.__name__} is read from an object, not from {describe_value(data)}")
    config = decode(data, cls, "")
    check_fields(config, "")
    return config


def flatten(config: Settings, key: str = "") -> JsonObject:
    """Returns the value of every leaf by its dotted key: `rl.optim.b1`, `data.sources.0.size`."""
    if dataclasses.is_dataclass(config):
        children = [(NAME, config.name)] if isinstance(config, Seam) else []
        children += [(f.name, getattr(config, f.name)) for f in dataclasses.fields(config)]
    elif isinstance(config, tuple) and any(dataclasses.is_dataclass(x) for x in config):
        children = [(str(i), x) for i, x in enumerate(config)]
    else:
        return {key: config}
    flat: JsonObject = {}
    for name, value in children:
        flat.update(flatten(value, f"{key}.{name}" if key else name))
    return flat


def differences(old: Settings, new: Settings) -> dict[str, tuple[Json, Json]]:
    """Returns the keys whose values differ, with (old, new); "absent" for a missing key."""
    return changed_keys(flatten(old), flatten(new))


def changed_keys(old: JsonObject, new: JsonObject) -> dict[str, tuple[Json, Json]]:
    """Returns `differences` of two configurations by `flatten`."""
    pairs = {key: (old.get(key, "absent"), new.get(key, "absent")) for key in old | new}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _dataclasses_of(hint: Hint) -> dict[str, type]:
    classes: list[Settings] = [cls for cls in options(hint) if dataclasses.is_dataclass(cls)]
    return {cls.__name__: cls for cls in classes}


def _required(cls: Settings) -> list[str]:
    fields = (f for f in dataclasses.fields(cls) if f.default is f.default_factory)  # MISSING
    return [field.name for field in fields]


def _encode(value: Json, hint: Hint) -> Json:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls: Settings = type(value)
        hints = field_hints(cls)
        tag = {KIND: type(value).__name__} if len(_dataclasses_of(hint)) > 1 else {}
        tag |= {NAME: value.name} if isinstance(value, Seam) else {}
        return tag | {name: _encode(getattr(value, name), hints[name]) for name in hints}
    if isinstance(value, tuple):
        inner = typing.get_args(hint)
        return [_encode(x, inner[0] if inner else Any) for x in value]
    return value


def decode(data: Json, hint: Hint, key: str) -> Json:
    """Returns `data` with objects converted to the dataclasses of `hint`, lists to tuples, and
    words of a command line to their value.
    """
    if isinstance(data, Words):
        entries = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
        if not any(isinstance(x, type) and issubclass(x, Seam) for x in entries):
            return data.value(hint, key)
        data = data.entries(key)
    classes = _dataclasses_of(hint)
    base = next((cls for cls in classes.values() if issubclass(cls, Seam)), None)
    if base is not None and isinstance(data, dict | str):
        data = {NAME: data} if isinstance(data, str) else data
        name = data.get(NAME)
        if not isinstance(name, str):
            raise ConfigError(
                f"{key}.{NAME} = {describe_value(name)}: it must name a class,"
                f" {' or '.join(base.classes)} or your own"
            )
        cls, rest = seam_class(base, name), {k: x for k, x in data.items() if k != NAME}
        return _decode_dataclass(rest, {cls.__name__: cls}, key)
    if classes and isinstance(data, dict):
        return _decode_dataclass(data, classes, key)
    if not isinstance(data, list):
        return data
    inner = typing.get_args(hint)
    if inner and _dataclasses_of(inner[0]):
        return tuple(decode(x, inner[0], f"{key}.{i}") for i, x in enumerate(data))
    return tuples(data)


def is_removed(cls: type, name: str, value: Json, key: str) -> bool:
    """Returns whether `name` is a setting of an earlier version of `cls`, to be ignored. Raises
    ConfigError for one that was on, because a run must not continue without it in silence.
    """
    if (cls.__name__, name) not in REMOVED:
        return False
    off, became = REMOVED[cls.__name__, name]
    # The replay of groups was a section with their number.
    if became and (value.get("groups") if isinstance(value, dict) else value) not in off:
        raise ConfigError(f"{key[:200]}: {became}")
    return True


def _decode_dataclass(data: JsonObject, classes: dict[str, type], key: str) -> Json:
    where = key or "the configuration"
    kind = data.get(KIND, _kind_by_keys(data, classes)) if len(classes) > 1 else next(iter(classes))
    if not isinstance(kind, str) or kind not in classes:
        raise ConfigError(
            f"{where}.{KIND} = {describe_value(kind)}: must be one of {', '.join(classes)}"
        )
    cls = classes[kind]
    hints = field_hints(cls)
    values = {}
    for name, value in data.items():
        full = f"{key}.{name}" if key else name
        if (name == KIND and len(classes) > 1) or is_removed(cls, name, value, full):
            continue
        if name not in hints:
            matches = difflib.get_close_matches(name, hints, n=1)
            usual = f"did you mean {matches[0]}?" if matches else ""
            hint = foreign_name(full) or foreign_name(name) or usual
            raise ConfigError(f"{full[:200]}: no such key" + (f"; {hint}" if hint else ""))
        values[name] = decode(value, hints[name], full)
    absent = [name for name in _required(cls) if name not in values]
    if absent:
        raise ConfigError(f"{where}: {', '.join(absent)} must be given")
    return cls(**values)


def _kind_by_keys(data: JsonObject, classes: dict[str, type]) -> str | None:
    """Returns the only class that has all keys of an object and whose required fields are among
    them; else None.
    """
    fitting = [
        name
        for name, cls in classes.items()
        if (needed := set(_required(cls))) and needed <= data.keys() <= field_hints(cls).keys()
    ]
    return fitting[0] if len(fitting) == 1 else None
