"""Names of files of rows."""

from __future__ import annotations

from compass_jax.config.errors import check

ARRAY_RECORDS = (".arrayrecord", ".array_record")
ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", *ARRAY_RECORDS)


def check_rows_path(path: str, key: str) -> None:
    """Raises ConfigError for a name that is neither a file of rows nor a folder, whose name has no
    dot.
    """
    check(bool(path), f"{key} is empty: name a file of rows, or a folder of such files")
    check(
        path.endswith((*ENDINGS, "/")) or "." not in path.rpartition("/")[2],
        f"{key} = {path!r}: must end in {', '.join(ENDINGS)}, or name a folder of such files (with"
        " a / at its end where its name has a dot)",
    )
