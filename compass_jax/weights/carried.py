"""The files that are copied with a model's weights: tokenizer files and
`generation_config.json`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from compass_jax.base.token_ids import GENERATION
from compass_jax.model.families.raw import WeightsError
from compass_jax.weights.hf_config import find_token_ids, read_json

CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    GENERATION,
)


def carried_files(source: str | Path | None) -> list[Path]:
    """Returns the files of `CARRIED` that exist in the folder `source`; an empty list for None.

    Raises WeightsError for a broken link.
    """
    if source is None:
        return []
    paths = [Path(source) / name for name in CARRIED]
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise WeightsError(
                f"{path} is a link that leads nowhere ({path.readlink()}): download the file"
                " again, or remove the link"
            )
    return [path for path in paths if path.is_file()]


def carry_files(source: str | Path | None, target: Path) -> None:
    """Copies `carried_files(source)` into the folder `target`. Raises WeightsError if a copy fails.

    The copy of `generation_config.json` lists every token that ends an answer here, so that the
    exported model stops where the trained one did. The file is added if only config.json, which is
    not copied, lists several end tokens.
    """
    for path in carried_files(source):
        copy = target / path.relative_to(Path(source or ""))
        try:
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        except OSError as error:
            reason = error.strerror or error
            raise WeightsError(f"{path} could not be copied to {target}: {reason}") from error
    if source is not None:
        _complete_end_tokens(Path(source), target / GENERATION)


def _complete_end_tokens(source: Path, file: Path) -> None:
    """Writes every end token of `source` into `file`, a generation_config.json, unless it lists
    them already. A missing file is created only for several end tokens.
    """
    ends = find_token_ids(source).get("eos_token_id")
    if not file.is_file() and not isinstance(ends, list):
        return
    raw = read_json(file) if file.is_file() else {}
    named, required = (x if isinstance(x, list) else [x] for x in (raw.get("eos_token_id"), ends))
    if set(named) != set(required):
        file.write_text(json.dumps(raw | {"eos_token_id": ends}, indent=2) + "\n")
