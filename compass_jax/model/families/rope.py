"""Rotary embeddings in a Hugging Face `config.json`: their base, their scaling and the part of a
head that they turn, in the spelling of the hub (`rope_theta`, `rope_scaling`) and in that of
transformers 5 (`rope_parameters`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from compass_jax.base.aliases import JsonMapping, JsonObject, Settings
from compass_jax.config import LinearRope, Llama3Rope, ModelConfig, RopeScaling, YarnRope
from compass_jax.model.families.raw import Raw, agreed, unsupported

_ORIGINAL = "original_max_position_embeddings"
_PLACES = ("rope_scaling", "rope_parameters")
THETA, PARTIAL = "rope_theta", "partial_rotary_factor"
_PLAIN_KEYS = {"rope_type", "type", THETA, PARTIAL}
# rope_type -> its class.
CLASSES: Mapping[str, type[Settings]] = {
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}
SCALED = tuple(CLASSES)


def _keys(kind: str) -> dict[str, dataclasses.Field]:
    """Returns the keys of config.json for a type of scaling, with the fields of its class."""
    fields = dataclasses.fields(CLASSES[kind])
    return {_ORIGINAL if x.name == "original_positions" else x.name: x for x in fields}


def rope_problems(declared: JsonObject, scaled: tuple[str, ...], partial: bool) -> list[str]:
    """Returns a message for rotary embeddings that are partial (unless the class has such), are
    scaled in a way that is not among the types `scaled`, or have an unknown key, which would change
    the angles.
    """
    lines = []
    for field, rope in ((x, declared[x]) for x in _PLACES if x in declared):
        types = _types(rope)
        known = _PLAIN_KEYS.union(*(_keys(kind) for kind in types & set(scaled)))
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


def _types(rope: object) -> set[str]:
    """Returns the types that rope_type and type name; they are alike in a sound file."""
    if not isinstance(rope, dict):
        return {"default"}  # `rope_problems` refuses it
    names = [rope[key] for key in ("rope_type", "type") if key in rope]
    return {name for name in names if isinstance(name, str)} or {"default"}


def read_rope(
    declared: Raw, defaults: JsonMapping, key: str, positions: int, fraction: float
) -> JsonObject:
    """Returns the fields of ModelConfig; `key` is that of the base, `positions` and `fraction` are
    the model's longest sequence and the class's default fraction of a head. Raises WeightsError for
    a missing or malformed value, and where two places disagree.

    `declared` lacks the defaults: the default base could disagree with rope_parameters.
    """
    thetas = {name: x.number(THETA) for name, x in places(declared, THETA, key).items()}
    fractions = {x.number(PARTIAL) for x in places(declared, PARTIAL, PARTIAL).values()}
    where, theta = declared.where, defaults.get(key)
    gives = " and ".join(f"{name} gives rope_theta = {value}" for name, value in thetas.items())
    listed = " and ".join(map(str, sorted(fractions)))
    return {
        "rope_theta": agreed(thetas.values(), theta, f"{where}: {gives}; they disagree"),
        "rope_scaling": _read_scaling(declared, defaults, positions),
        "rotary_fraction": agreed(fractions, fraction, f"{where}: {PARTIAL} is {listed}"),
    }


def places(declared: Raw, name: str, key: str) -> dict[str, Raw]:
    """Returns the objects of config.json that have a value of rotary embeddings under `name`:
    rope_scaling, rope_parameters, and, under its `key`, the file itself.
    """
    objects = {key: {name: declared.get(key)}} | {x: declared.get(x) for x in _PLACES}
    return {
        place: Raw(x, f"{declared.where}: {place}")
        for place, x in objects.items()
        if isinstance(x, dict) and x.get(name) is not None
    }


def _read_scaling(raw: Raw, defaults: JsonMapping, positions: int) -> RopeScaling | None:
    values = {x: raw.get(x) for x in _PLACES if raw.get(x) is not None}
    if not values and "rope_scaling" in defaults:
        values = {"rope_scaling": defaults["rope_scaling"]}
    ropes = [Raw(value, f"{raw.where}: {name}") for name, value in values.items()]
    message = f"{raw.where}: rope_scaling and rope_parameters disagree; remove one"
    return agreed((_scaling(rope, raw, positions) for rope in ropes), None, message)


def _scaling(rope: Raw, raw: Raw, max_positions: int) -> RopeScaling | None:
    # `rope_problems` has refused an object that names two types.
    (kind,) = _types(rope.values)
    if kind == "default":
        return None
    values: JsonObject = {}
    for key, field in _keys(kind).items():
        if key == _ORIGINAL:
            # the scaling's object, the top level of config.json, or else the model's longest
            lengths = [x.integer(_ORIGINAL) for x in (rope, raw) if x.get(_ORIGINAL) is not None]
            message = (
                f"{raw.where}: {_ORIGINAL} = {raw.get(_ORIGINAL)}, and {rope.get(_ORIGINAL)} in"
                f" {rope.where.rpartition(' ')[2]}; they disagree"
            )
            values[field.name] = agreed(lengths, max_positions, message)
        elif field.default is dataclasses.MISSING or rope.get(key) is not None:
            read = rope.flag if key == "truncate" else rope.number
            values[field.name] = read(key)
    return CLASSES[kind](**values)


def written_rope(config: ModelConfig, defaults: JsonMapping, partial: bool) -> JsonObject:
    """Returns the keys of config.json. A scaling of null is the class's in `defaults`."""
    scaling, values = config.rope_scaling, None
    if scaling is not None:
        values = {"rope_type": rope_type(scaling)}
        # A default of null or 0 means that the key is not set.
        for key, field in _keys(rope_type(scaling)).items():
            if (value := getattr(scaling, field.name)) or field.default:
                values[key] = value
    elif "rope_scaling" in defaults:
        values = {"rope_type": "default"}
    fraction = {PARTIAL: config.rotary_fraction} if partial else {}
    return {"rope_scaling": values, **fraction}


def rope_type(scaling: RopeScaling) -> str:
    """Returns the type of a scaling in config.json."""
    return next(name for name, cls in CLASSES.items() if isinstance(scaling, cls))
