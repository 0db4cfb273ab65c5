"""The function of each kind of stage. Each resumes an interrupted stage."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from compass_jax.base.aliases import JsonObject
from compass_jax.config import ConfigError
from compass_jax.config.named import load
from compass_jax.config.stages import (
    Distil,
    Evaluate,
    Export,
    Filter,
    Import,
    Merge,
    Mine,
    Prepare,
    Rl,
    Rows,
    Sft,
    Stage,
    TrainJudge,
)
from compass_jax.runs.logfile import replaced
from compass_jax.runs.rundir import SUMMARY

Output = Callable[[str], Path]  # stage name -> its rows or weights


def work(stage: Stage, folder: Path, output: Output) -> int:
    """Runs a stage; returns 0, or the exit status of a run that stopped on request.

    stage: its settings, with paths instead of "stage:NAME" (`Record.placed`).
    """
    return WORK[type(stage)](stage, folder, output) or 0


def _rows(stage: Rows, folder: Path, _: Output) -> None:
    rows = load(stage.function, "function")(**dict(stage.arguments))
    _write(rows, folder / stage.output, f"function = {stage.function!r}: it gave no row")


def _mine_pairs(stage: Mine, folder: Path, _: Output) -> None:
    from compass_jax.apps.pipeline.mine import mine_file

    rows = mine_file(stage.rollouts, stage.per_group, stage.last_steps)
    empty_message = (
        f"rollouts = {stage.rollouts!r}: no answer has a gold label, is truncated or breaks its"
        " form, so that no verdict is known; give the judged source a `gold` verifier"
    )
    _write(rows, folder / stage.output, empty_message)
    print(", ".join(f"{n} {name}" for name, n in Counter(x["verdict"] for x in rows).items()))


def _write(rows: Iterable[JsonObject], file: Path, empty_message: str) -> None:
    """Writes rows as JSON lines. Raises ConfigError with `empty_message` for no rows."""
    count = 0
    with replaced(file) as temporary:
        with open(temporary, "w", encoding="utf-8") as out:
            for row in rows:
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
            out.flush()
            os.fsync(out.fileno())
        if not count:
            raise ConfigError(empty_message)
    print(f"{count} rows: {file}")


def _prepare(stage: Prepare, folder: Path, _: Output) -> None:
    from rich.console import Console

    from compass_jax.apps.curate.prepare import prepare
    from compass_jax.apps.curate.report import table
    from compass_jax.runs.report import summary_table

    tally = prepare(stage.settings, str(folder), print)
    console = Console(soft_wrap=True, emoji=False)
    console.print(summary_table(table(tally), title=f"{tally.rows:,} rows"))


def _distil(stage: Distil, folder: Path, _: Output) -> None:
    from compass_jax.apps.curate.distil import distil

    report = distil(stage.settings, str(folder), print)
    counts = f"{report['right']} of {report['answers']} answers are right"
    print(f"{counts}; kept {report['kept']}: {folder / stage.output}")


def _import(stage: Import, folder: Path, _: Output) -> None:
    from compass_jax.weights.gguf_folder import import_gguf

    out = folder / stage.output
    if out.exists():  # it exists only when complete
        return
    print(f"written: {import_gguf(stage.file, out)}")


def _sft(stage: Sft, folder: Path, output: Output) -> int:
    from compass_jax.training.sft import run_sft

    return _status(run_sft(_started(stage, folder, output)))


def _rl(stage: Rl, folder: Path, output: Output) -> int:
    from compass_jax.training.rl import run_rl

    return _status(run_rl(_started(stage, folder, output)))


def _filter(stage: Filter, folder: Path, output: Output) -> None:
    from compass_jax.apps.pipeline.offline_filter import Bounds, run_filter

    run, bounds = _started(stage, folder, output), Bounds(stage.samples, stage.low, stage.high)
    run_filter(run.policy, run.scored, run.init_from, str(folder), bounds)


def _train_judge(stage: TrainJudge, folder: Path, output: Output) -> int:
    from compass_jax.apps.pipeline.train_judge import run_train_judge

    return _status(run_train_judge(_started(stage, folder, output), stage.scalar))


def _started(stage: Sft | Filter | TrainJudge | Rl, folder: Path, output: Output) -> Any:
    start = str(output(stage.start)) if stage.start else stage.run.init_from
    return replace(stage.run, run_dir=str(folder), init_from=start)


def _status(result: JsonObject) -> int:
    return result["status"] if result["stopped"] else 0


def _merge(stage: Merge, folder: Path, output: Output) -> None:
    from compass_jax.apps.curate.merge import method_of, routers_from
    from compass_jax.apps.curate.merge_folders import merge_folders

    out = folder / stage.output
    if out.exists():  # it exists only when complete
        return
    weights, density = stage.weights or None, stage.density or None
    method = method_of(stage.method, len(stage.parents), weights, density)
    models = [output(name) for name in stage.parents]
    whose = routers_from(stage.routers)
    merge_folders(
        output(stage.base), models, out, method, scale=stage.scale, routers_from=whose, tell=print
    )
    print(f"written: {out}")


def _evaluate(stage: Evaluate, folder: Path, output: Output) -> None:
    from compass_jax.experience.evaluate import evaluate_weights

    for name in stage.of:
        if not (folder / name / SUMMARY).is_file():  # the summary is written last
            print(f"{name}:")
            evaluate_weights(stage.run, str(output(name)), str(folder / name))


def _export(stage: Export, folder: Path, output: Output) -> None:
    from compass_jax.weights.convert import export_hf

    path = export_hf(output(stage.start), folder / stage.output, replace=True)
    print(f"written: {path}; transformers reads it by AutoModelForCausalLM")


WORK: dict[type, Callable[[Any, Path, Output], int | None]] = {
    Rows: _rows,
    Prepare: _prepare,
    Distil: _distil,
    Import: _import,
    Sft: _sft,
    Merge: _merge,
    Filter: _filter,
    TrainJudge: _train_judge,
    Mine: _mine_pairs,
    Rl: _rl,
    Evaluate: _evaluate,
    Export: _export,
}
