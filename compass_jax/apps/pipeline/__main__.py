"""The process of one stage: `python -m compass_jax.apps.pipeline FOLDER PARENT [CACHE]`. A separate
process frees the stage's memory at its end.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from compass_jax.runs.signals import STATUSES, Ending, leave, prepare_streams


def main(folder: str, parent: str, cache: str = "") -> int:
    """Runs the stage of a folder, `Pipeline.begin`; returns its exit status.

    parent: id of the process that runs the pipeline; this process ends with it.
    """
    from compass_jax.base.errors import CompassError
    from compass_jax.devices.processes.guards import die_with_parent
    from compass_jax.runs import words

    if sys.platform == "linux":
        die_with_parent()
    if os.getppid() != int(parent):
        return CompassError.exit_status
    from compass_jax.apps.pipeline.stages import read_stage
    from compass_jax.runs.compiled import keep_programs

    try:
        stage = read_stage(Path(folder))
        if notice := keep_programs(cache):
            print(notice, file=sys.stderr)
        return stage.run()
    except Exception as error:
        text = words.in_words(error)
        if text is None:
            raise
        name = Path(folder).name.partition("-")[2]
        print(f"compass pipeline: stage {name}: {text}", file=sys.stderr)
        return error.exit_status if isinstance(error, CompassError) else 1


if __name__ == "__main__":
    prepare_streams()
    with Ending("compass pipeline"):
        status = main(*sys.argv[1:])
        if status in STATUSES:
            leave(status)
    sys.exit(status)
