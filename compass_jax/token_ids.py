"""The end tokens that a model's folder names: transformers and vLLM stop at them too."""

from __future__ import annotations

from pathlib import Path

from compass_jax.errors import UserError
from compass_jax.untrusted import read_json

GENERATION = "generation_config.json"


def end_ids(folder: str | Path, error: type[UserError]) -> list[int]:
    """Returns the end tokens that generation_config.json names, else those of config.json; an empty
    list where neither names one. Raises `error` for a value that is no token id.
    """
    for name in (GENERATION, "config.json"):
        file = Path(folder) / name
        if not file.is_file():
            continue
        raw = read_json(file, error=error, most_digits=40)
        value = raw.get("eos_token_id") if isinstance(raw, dict) else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        # Not isinstance, because a bool is an int.
        if not all(type(i) is int and i >= 0 for i in ids):
            raise error(
                f"{file}: eos_token_id = {str(value)[:80]}: a token id, or a list of them, is"
                " expected"
            )
        return list(dict.fromkeys(ids))
    return []
