"""Rotary embeddings in a Hugging Face `config.json`: their base and their scaling, in the spelling
of the hub (`rope_theta`, `rope_scaling`) and in that of transformers 5 (`rope_parameters`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from compass_jax.aliases import Json, JsonMapping, JsonObject, Settings
from compass_jax.config import LinearRope, Llama3Rope, RopeScaling, YarnRope
from compass_jax.families.raw import Raw, WeightsError, unsupported

_ORIGINAL = "original_max_position_embeddings"
_PLACES = ("rope_scaling", "rope_parameters")
PARTIAL = "partial_rotary_factor"
_PLAIN_KEYS = {"rope_type", "type", "rope_theta", PARTIAL}
# rope_type -> its class.
CLASSES: Mapping[str, type[Settings]] = {
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}
SCALED = tuple(CLASSES)


def _key(field: str) -> str:
    """Returns the key of config.json for a field of a scaling's class."""
    return _ORIGINAL if field == "original_positions" else field


def rope_problems(
    declared: JsonObject, scaled: tuple[str, ...], partial: bool = False
) -> list[str]:
    """Returns a message for rotary embeddings that are partial (unless the class has such), are
    scaled in a way that is not among the types `scaled`, or have an unknown key, which would change
    the angles.
    """
    lines = []
    for field in _PLACES:
        rope = declared.get(field)
        if rope is None:
            continue
        types = _types(rope)
        known = _PLAIN_KEYS | {
            _key(x.name) for t in types & set(scaled) for x in dataclasses.fields(CLASSES[t])
        }
        if (
            not isinstance(rope, dict)
            or not set(rope) <= known
            or len(types) > 1
            or not types <= {"default", *scaled}
            or (rope.get(PARTIAL, 1.0) != 1.0 and not partial)
        ):
            hint = "rope_type 'default' with rope_theta, over the whole head"
            hint += f"; or rope_type {', '.join(scaled)}" if scaled else ""
            lines.append(unsupported(field, rope, hint))
    return lines


def _types(rope: Json) -> set[str]:
    """Returns the types that rope_type and type name; they are alike in a sound file."""
    if not isinstance(rope, dict):
        return {"default"}  # `rope_problems` refuses it
    names = [rope[key] for key in ("rope_type", "type") if key in rope]
    return {name for name in names if isinstance(name, str)} or {"default"}


def rope_theta(raw: Raw, default: Json) -> float:
    """Returns the base of rotary embeddings. Raises WeightsError where two fields disagree."""
    thetas = {
        field: Raw(values, f"{raw.where}: {field}").number("rope_theta")
        for field, values in thetas_of(raw.values).items()
    }
    if len(set(thetas.values())) > 1:
        raise WeightsError(
            f"{raw.where}: "
            + " and ".join(f"{field} gives rope_theta = {value}" for field, value in thetas.items())
            + "; they disagree"
        )
    return next(iter(thetas.values()), default)


def rotary_fraction(raw: Raw, default: float) -> float:
    """Returns the fraction of a head that rotary embeddings turn. Raises WeightsError where two
    fields disagree.
    """
    places = {"config.json": raw.values} | {x: raw.values[x] for x in _PLACES if x in raw.values}
    fractions = {
        Raw(values, f"{raw.where}: {name}").number(PARTIAL)
        for name, values in places.items()
        if isinstance(values, dict) and values.get(PARTIAL) is not None
    }
    if len(fractions) > 1:
        raise WeightsError(f"{raw.where}: {PARTIAL} is {' and '.join(map(str, sorted(fractions)))}")
    return next(iter(fractions), default)


def thetas_of(declared: JsonObject) -> dict[str, JsonObject]:
    """Returns the objects of config.json that have a rope_theta, by name."""
    places = [("rope_theta", declared)]
    places += [(field, declared[field]) for field in _PLACES if field in declared]
    return {
        field: values
        for field, values in places
        if isinstance(values, dict) and values.get("rope_theta") is not None
    }


def rope_scaling(raw: Raw, max_positions: int, defaults: JsonMapping) -> RopeScaling | None:
    """Returns the scaling of rotary embeddings in config.json, or else the one in `defaults`.
    Raises WeightsError for a missing or malformed value, and where two fields disagree.
    """
    if all(raw.get(field) is None for field in _PLACES) and "rope_scaling" in defaults:
        raw = Raw(raw.values | {"rope_scaling": defaults["rope_scaling"]}, raw.where)
    scalings = {
        field: _scaling(Raw(raw.values[field], f"{raw.where}: {field}"), raw, max_positions)
        for field in _PLACES
        if raw.get(field) is not None
    }
    if len(set(scalings.values())) > 1:
        raise WeightsError(f"{raw.where}: rope_scaling and rope_parameters disagree; remove one")
    return next(iter(scalings.values()), None)


def _scaling(rope: Raw, raw: Raw, max_positions: int) -> RopeScaling | None:
    # `rope_problems` has refused an object that names two types.
    (kind,) = _types(rope.values)
    if kind == "default":
        return None
    values: JsonObject = {}
    for field in dataclasses.fields(CLASSES[kind]):
        key = _key(field.name)
        if key == _ORIGINAL:
            values[field.name] = _original_positions(rope, raw, max_positions)
        elif field.name == "truncate":
            values[field.name] = rope.flag(key, field.default)
        elif field.default is dataclasses.MISSING or rope.get(key) is not None:
            values[field.name] = rope.number(key)
    return CLASSES[kind](**values)


def _original_positions(rope: Raw, raw: Raw, max_positions: int) -> int:
    """Returns the longest sequence of pretraining: from the scaling's object, from the top level of
    config.json, or else the model's `max_positions`. Raises WeightsError where two disagree.
    """
    positions = {
        place.integer(_ORIGINAL) for place in (rope, raw) if place.get(_ORIGINAL) is not None
    }
    if len(positions) > 1:
        raise WeightsError(
            f"{raw.where}: {_ORIGINAL} = {raw.get(_ORIGINAL)}, and {rope.get(_ORIGINAL)} in"
            f" {rope.where.rpartition(' ')[2]}; they disagree"
        )
    return next(iter(positions), max_positions)


def written_scaling(
    scaling: RopeScaling | None, defaults: JsonMapping | None = None
) -> JsonObject | None:
    """Returns the value of `rope_scaling` in config.json; null is no scaling unless the class has
    one in `defaults`.
    """
    if scaling is None:
        return {"rope_type": "default"} if "rope_scaling" in (defaults or {}) else None
    kind = next(name for name, cls in CLASSES.items() if isinstance(scaling, cls))
    values = {_key(name): value for name, value in dataclasses.asdict(scaling).items()}
    optional = {"attention_factor": None, "mscale": 0.0, "mscale_all_dim": 0.0}
    absent = [key for key, value in optional.items() if values.get(key, ...) == value]
    return {"rope_type": kind} | {key: x for key, x in values.items() if key not in absent}
