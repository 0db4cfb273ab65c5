"""Names of files of rows."""

from __future__ import annotations

from compass_jax.config.errors import check
from compass_jax.config.foreign import hub_hint

ARRAY_RECORDS = (".arrayrecord", ".array_record")
ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", *ARRAY_RECORDS)


def check_rows_path(path: str, key: str) -> None:
    """Raises ConfigError for a path that is neither a file of rows nor a folder (a name without a
    dot).
    """
    check(bool(path), f"{key} is empty: name a file of rows, or a folder of such files")
    hint = hub_hint(path, dataset=True)
    check(
        not hint or path.endswith(ENDINGS) or "." not in path,
        f"{key} = {path!r}: there is no such file or folder; {hint}",
    )
    check(
        path.endswith((*ENDINGS, "/")) or "." not in path.rpartition("/")[2],
        f"{key} = {path!r}: must end in {', '.join(ENDINGS)}, or name a folder of such files (with"
        " a / at its end where its name has a dot)",
    )
