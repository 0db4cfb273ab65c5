"""The refusal of a config.json whose model type no family has: every reason at once."""

from __future__ import annotations

import re
from collections.abc import Collection

from compass_jax.base.aliases import JsonObject
from compass_jax.model.families.base import Family
from compass_jax.model.families.raw import unsupported

# other classes' names of the sizes that a family file can rename
_EXPERTS = re.compile(r"(?:[a-z]+_)?(?:n|num)_(?:[a-z]+_)?experts")
_SIZE = re.compile(
    r"(?:n|num)_(?:embd|layers?|heads?|positions|ctx|inner|kv_heads)|d_model|d_ff|dim|ffn_dim"
    r"|max_seq_len\w*|seq_length|\w*norm_eps(?:ilon)?|padded_vocab_size"
    rf"|{_EXPERTS.pattern}(?:_per_tok(?:en)?)?|experts_per_tok(?:en)?|moe_(?:top_?)?k|top_k_experts"
    r"|(?:moe|experts?)_(?:ffn_)?(?:(?:hidden|intermediate|inner)_)?(?:size|dim)"
)
_FAMILY_FILE = (
    "another one by a family file: compass import-hf FOLDER OUT --family path/file.py:FAMILY, then"
    " --model OUT"
)


def unknown_type(
    raw: JsonObject, families: Collection[Family], is_users: bool, problems: Collection[str] = ()
) -> list[str]:
    """Returns the reasons why a config.json is not supported whose model type is of none of the
    `families`: the type, and all that the nearest family could not compute.

    A family file is proposed only where it could help: where no value and no key besides those of
    sizes is beyond the nearest family. `is_users`: the family is the user's, as in --family.
    `problems`: reasons found before.
    """
    declared = {key: value for key, value in raw.items() if value is not None}
    ranks = {family.mla_keys["kv_rank"] for family in families if family.mla_keys}
    kind = any(map(_EXPERTS.fullmatch, raw)), not ranks.isdisjoint(raw)
    similar = [x for x in families if (x.moe_keys is not None, x.mla_keys is not None) == kind]
    readings = [(family, _problems(family, declared)) for family in similar or families]
    nearest, lines = min(readings, key=lambda reading: len("".join(reading[1])))
    known = " | ".join(family.model_type for family in families)
    first = unsupported("model_type", raw.get("model_type"), known)
    if not (is_users or problems or _has_other_maths(nearest, declared, lines)):
        first = first.removesuffix(")") + f"; {_FAMILY_FILE})"
    if is_users or not lines:
        return [first, *problems]
    return [first, *problems, f"read as {nearest.model_type}, the nearest family:", *lines]


def _problems(family: Family, declared: JsonObject) -> list[str]:
    named = {"model_type": family.model_type, "architectures": [family.architecture]}
    return family.problems(declared | named, "config.json")


def _has_other_maths(family: Family, declared: JsonObject, lines: Collection[str]) -> bool:
    """Returns whether something besides names of sizes is beyond the family."""
    keys = family.unknown_keys(declared)
    absent = sum(line.startswith("it has no ") for line in lines)
    return len(lines) > absent + bool(keys) or not all(map(_SIZE.fullmatch, keys))
