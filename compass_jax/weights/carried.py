"""The files that go with a model wherever its weights go: its tokenizer's, and
`generation_config.json`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from compass_jax.families.raw import WeightsError

CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)


def carried_files(source: str | Path | None) -> list[Path]:
    """Those of `CARRIED` that the folder `source` has; none for None.

    Raises WeightsError for a link that leaves the folder: whatever it leads to would be published
    with the model. The Hugging Face cache's own links, snapshots/REVISION/x -> blobs/y, stay
    inside.
    """
    if source is None:
        return []
    paths = [Path(source) / name for name in CARRIED]
    for path in paths:
        if path.is_symlink():
            _check_link(path)
    return [path for path in paths if path.is_file()]


def carry_files(source: str | Path | None, target: Path) -> None:
    """Copies `carried_files(source)` into the folder `target`. Raises WeightsError where one cannot
    be copied.
    """
    for path in carried_files(source):
        try:
            shutil.copyfile(path, target / path.name)
        except OSError as error:
            reason = error.strerror or error
            raise WeightsError(f"{path} could not be copied to {target}: {reason}") from error


def _check_link(path: Path) -> None:
    try:
        folder, real = path.parent.resolve(), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise WeightsError(
            f"{path} is a link that leads nowhere ({path.readlink()}): download the file again, or"
            " remove the link"
        ) from error
    revisions = [part for part in (folder, *folder.parents) if part.parent.name == "snapshots"]
    inside = [folder, *(part.parent.parent / "blobs" for part in revisions)]
    if not any(real.is_relative_to(allowed) for allowed in inside):
        raise WeightsError(
            f"{path} is a link to {real}, outside the model's folder, and would be copied with the"
            " model: put the file itself there, or remove the link"
        )
