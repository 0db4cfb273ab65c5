"""The refusal of a config.json whose model type no family has: every reason at once."""

from __future__ import annotations

import re
from collections.abc import Collection

from compass_jax.aliases import JsonObject
from compass_jax.families.base import Family
from compass_jax.families.keys import NEUTRAL, says_no_maths
from compass_jax.families.raw import WeightsError, unsupported

# other classes' names of the sizes that a family file can rename
_SIZE = re.compile(
    r"(?:n|num)_(?:embd|layers?|heads?|positions|ctx|inner|kv_heads)|d_model|d_ff|dim|ffn_dim"
    r"|max_seq_len\w*|seq_length|\w*norm_eps(?:ilon)?|padded_vocab_size"
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
    known = " | ".join(family.model_type for family in families)
    candidates = [family for family in families if _kind(family) == _kind_of_model(raw, families)]
    readings = [_Reading(family, raw) for family in candidates or families]
    nearest = min(readings, key=lambda reading: len("".join(reading.lines)))
    helps = not (is_users or problems or nearest.has_other_maths)
    kind = unsupported("model_type", raw.get("model_type"), known)
    if helps:
        kind = kind.removesuffix(")") + f"; {_FAMILY_FILE})"
    if is_users or not nearest.lines:
        return [kind, *problems]
    return [kind, *problems, f"read as {nearest.name}, the nearest family:", *nearest.lines]


def _kind(family: Family) -> tuple[bool, bool]:
    """Returns whether a family has experts, and multi-head latent attention."""
    return family.moe_keys is not None, family.mla_keys is not None


def _kind_of_model(raw: JsonObject, families: Collection[Family]) -> tuple[bool, bool]:
    """Returns `_kind` by the keys of a config.json."""
    experts = {family.moe_keys["experts"] for family in families if family.moe_keys}
    ranks = {family.mla_keys["kv_rank"] for family in families if family.mla_keys}
    return not experts.isdisjoint(raw), not ranks.isdisjoint(raw)


class _Reading:
    """A config.json, read as one of a family's."""

    def __init__(self, family: Family, raw: JsonObject):
        self.name = family.model_type
        declared = {key: value for key, value in raw.items() if value is not None}
        constants = {**family.fixed, **family.served}
        known = {*family.read_keys, *family.unread, *constants, *NEUTRAL}
        unread = [key for key in declared if key not in known and not says_no_maths(key)]
        named = {**declared, "model_type": self.name, "architectures": [family.architecture]}
        try:
            self.lines = family.problems(named, "config.json")
        except WeightsError as error:
            self.lines = [str(error)]
        absent = [line for line in self.lines if line.startswith("it has no ")]
        values = len(self.lines) - len(absent) - bool(unread)
        self.has_other_maths = values > 0 or not all(map(_SIZE.fullmatch, unread))
