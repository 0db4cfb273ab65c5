"""`RunConfig` to JSON and back, exactly; and the differences between two configurations, key by key."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from typing import Any

from compass_jax.config import ConfigError, RunConfig

KIND = "kind"  # where a field may hold one of several dataclasses, this key names which


def config_to_json(config: RunConfig) -> str:
    """The configuration as indented JSON; `config_from_json` gives an equal one back."""
    return json.dumps(to_plain(config), indent=2)


def config_from_json(text: str) -> RunConfig:
    """Reads what `config_to_json` wrote. A key that is absent takes its default.

    Raises ConfigError, naming the key, for text that is not JSON, an unknown key, a missing key without default, or a value of the wrong type.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the configuration is not JSON: {error}") from error
    return from_plain(RunConfig, data)


def to_plain(config: Any) -> dict[str, Any]:
    """A configuration class, or a part of one, as JSON's own types."""
    return _encode(config, type(config))


def from_plain(cls: type, data: Any) -> Any:
    """The inverse of `to_plain` for the dataclass `cls`; raises ConfigError like `config_from_json`."""
    return _decode(data, cls, "")


def flatten(config: Any, key: str = "") -> dict[str, Any]:
    """Dotted key -> value of every leaf, as the command line writes it: `rl.optim.b1`, `data.sources.0.size`."""
    if dataclasses.is_dataclass(config):
        children = [(f.name, getattr(config, f.name)) for f in dataclasses.fields(config)]
    elif isinstance(config, tuple) and any(dataclasses.is_dataclass(x) for x in config):
        children = [(str(i), x) for i, x in enumerate(config)]
    else:
        return {key: config}
    flat: dict[str, Any] = {}
    for name, value in children:
        flat.update(flatten(value, f"{key}.{name}" if key else name))
    return flat


def differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, with (old, new); a key that one side lacks has the text "absent" there."""
    a, b = flatten(old), flatten(new)
    keys = list(dict.fromkeys([*a, *b]))
    return {k: (a.get(k, "absent"), b.get(k, "absent")) for k in keys if a.get(k, "absent") != b.get(k, "absent")}


def _options(hint: Any) -> tuple:
    """The members of a union, or the hint alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _dataclasses_of(hint: Any) -> dict[str, type]:
    return {option.__name__: option for option in _options(hint) if dataclasses.is_dataclass(option)}


def _encode(value: Any, hint: Any) -> Any:
    if dataclasses.is_dataclass(value):
        hints = typing.get_type_hints(type(value))
        tag = {KIND: type(value).__name__} if len(_dataclasses_of(hint)) > 1 else {}
        return tag | {f.name: _encode(getattr(value, f.name), hints[f.name]) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        inner = typing.get_args(hint)
        return [_encode(x, inner[0] if inner else Any) for x in value]
    return value


def _decode(data: Any, hint: Any, key: str) -> Any:
    classes = _dataclasses_of(hint)
    if classes and isinstance(data, dict):
        return _decode_dataclass(data, classes, key)
    for option in _options(hint):
        found, value = _decode_plain(data, option, key)
        if found:
            return value
    raise ConfigError(f"{key} = {data!r}: the wrong type, it must be {_name(hint)}")


def _decode_dataclass(data: dict, classes: dict[str, type], key: str) -> Any:
    where = key or "the configuration"
    kind = data.get(KIND) if len(classes) > 1 else next(iter(classes))
    if kind not in classes:
        raise ConfigError(f"{where}.{KIND} = {kind!r}: must be one of {', '.join(classes)}")
    cls, hints = classes[kind], typing.get_type_hints(classes[kind])
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for name, value in data.items():
        full = f"{key}.{name}" if key else name
        if name == KIND and len(classes) > 1:
            continue
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            raise ConfigError(f"{full}: no such key" + (f"; did you mean {near[0]}?" if near else ""))
        values[name] = _decode(value, hints[name], full)
    missing = dataclasses.MISSING
    absent = [n for n, f in fields.items() if n not in values and f.default is missing and f.default_factory is missing]
    if absent:
        raise ConfigError(f"{where}: {', '.join(absent)} must be given")
    return cls(**values)


def _decode_plain(data: Any, option: Any, key: str) -> tuple[bool, Any]:
    """(whether `data` is an `option`, the value). Only None, booleans, numbers, text, literals and tuples occur."""
    origin, inner = typing.get_origin(option), typing.get_args(option)
    if origin is typing.Literal:
        return data in inner, data
    if (origin or option) is tuple:
        if not isinstance(data, list):
            return False, None
        if not inner:
            return True, _tuples(data)
        hints = [inner[0]] * len(data) if len(inner) == 2 and inner[1] is Ellipsis else list(inner)
        if len(hints) != len(data):
            raise ConfigError(f"{key} = {data!r}: must have {len(hints)} values")
        return True, tuple(_decode(x, h, f"{key}.{i}") for i, (x, h) in enumerate(zip(data, hints)))
    if isinstance(data, bool) or option is bool:
        return isinstance(data, bool) and option is bool, data
    if option is float:
        return isinstance(data, int | float), data
    return isinstance(option, type) and isinstance(data, option), data


def _tuples(data: Any) -> Any:
    return tuple(_tuples(x) for x in data) if isinstance(data, list) else data


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", None) if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
