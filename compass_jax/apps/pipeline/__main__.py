"""The process of one stage: `python -m compass_jax.apps.pipeline FOLDER NAME PARENT [CACHE]`. A
separate process frees the stage's memory at its end.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from compass_jax.runs.signals import STATUSES, Ending, leave, prepare_streams


def main(folder: str, name: str, parent: str, cache: str = "") -> int:
    """Runs a stage that the record lists as running; returns its exit status.

    parent: id of the process that runs the pipeline; this process ends with it.
    """
    from compass_jax.base.errors import CompassError
    from compass_jax.devices.processes.guards import die_with_parent
    from compass_jax.runs import words

    if sys.platform == "linux":
        die_with_parent()
    if os.getppid() != int(parent):
        return CompassError.exit_status
    from compass_jax.apps.pipeline.record import WHOLE, Record
    from compass_jax.apps.pipeline.work import work
    from compass_jax.base.untrusted import read_json
    from compass_jax.config.io import from_plain
    from compass_jax.config.pipeline import PipelineConfig
    from compass_jax.runs.compiled import keep_programs

    try:
        config = from_plain(PipelineConfig, read_json(Path(folder) / WHOLE))
        record = Record(config)
        stage = record.stage(name)
        if notice := keep_programs(cache):
            print(notice, file=sys.stderr)
        return work(record.placed(stage), record.place(stage), record.output)
    except Exception as error:
        text = words.in_words(error)
        if text is None:
            raise
        print(f"compass pipeline: stage {name}: {text}", file=sys.stderr)
        return error.exit_status if isinstance(error, CompassError) else 1


if __name__ == "__main__":
    prepare_streams()
    with Ending("compass pipeline"):
        status = main(*sys.argv[1:])
        if status in STATUSES:
            leave(status)
    sys.exit(status)
