"""The functions of a pipeline's stages. Each is given the stage's folder and its settings, and
continues an interrupted stage; OUTPUTS has the file or folder that it makes there.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.config import ConfigError, RunConfig
from compass_jax.config.distil import DistilConfig
from compass_jax.config.named import load
from compass_jax.config.prepare import PrepareConfig
from compass_jax.runs.logfile import replaced
from compass_jax.runs.rundir import SUMMARY


def rows(folder: Path, function: str, **arguments: Json) -> None:
    """Writes the rows, objects of JSON, that a user's function yields: my_rows:name or
    path/my_rows.py:name.
    """
    yielded = load(function, "function")(**arguments)
    _write(yielded, folder / OUTPUTS[rows], f"function = {function!r}: it gave no row")


def prepare(folder: Path, settings: PrepareConfig) -> None:
    """Writes conversations without duplicates, evaluation questions, and broken or wrong answers
    (`compass prepare-sft`).
    """
    from rich.console import Console

    from compass_jax.apps.curate.prepare import prepare
    from compass_jax.apps.curate.report import table
    from compass_jax.runs.report import summary_table

    tally = prepare(settings, str(folder), print)
    console = Console(soft_wrap=True, emoji=False)
    console.print(summary_table(table(tally), title=f"{tally.rows:,} rows"))


def distil(folder: Path, settings: DistilConfig) -> None:
    """Writes conversations with a teacher's answers that a verifier accepts (`compass distil`)."""
    from compass_jax.apps.curate.distil import distil as write_answers

    report = write_answers(settings, str(folder), print)
    counts = f"{report['right']} of {report['answers']} answers are right"
    print(f"{counts}; kept {report['kept']}: {folder / OUTPUTS[distil]}")


def import_gguf(folder: Path, file: str) -> None:
    """Writes a Hugging Face folder of a GGUF file's model (`compass import-gguf`)."""
    from compass_jax.weights.gguf_folder import import_gguf as convert

    out = folder / OUTPUTS[import_gguf]
    if not out.exists():  # it exists only when complete
        print(f"written: {convert(file, out)}")


def sft(folder: Path, run: RunConfig) -> int:
    """Trains by supervised fine-tuning (`compass sft`)."""
    from compass_jax.training.sft import run_sft

    return _status(run_sft(replace(run, run_dir=str(folder))))


def rl(folder: Path, run: RunConfig) -> int:
    """Trains by reinforcement learning (`compass train`)."""
    from compass_jax.training.rl import run_rl

    return _status(run_rl(replace(run, run_dir=str(folder))))


def train_judge(folder: Path, run: RunConfig) -> int:
    """Trains a judge on preferences, the files of `sft.preferences` and of `data.sources`
    (`compass train-judge`).
    """
    from compass_jax.apps.pipeline.train_judge import run_train_judge

    return _status(run_train_judge(replace(run, run_dir=str(folder))))


def train_scalar_judge(folder: Path, run: RunConfig) -> int:
    """Trains a scalar reward model on the preferences of `train_judge`, by the sft settings."""
    from compass_jax.apps.pipeline.train_judge import run_train_judge

    return _status(run_train_judge(replace(run, run_dir=str(folder)), scalar=True))


def filter_prompts(
    folder: Path, run: RunConfig, samples: int = 8, low: float = 0.0, high: float = 1.0
) -> None:
    """Writes the pass rates of the training prompts under the weights of `init_from` (`compass
    filter`), for `data.keep_file` of RL on the same data with the same seed.
    """
    from compass_jax.apps.pipeline.offline_filter import Bounds, run_filter

    bounds = Bounds(samples, low, high)
    run_filter(run.policy, run.scored, run.init_from, str(folder), bounds)


def mine_pairs(folder: Path, rollouts: str, per_group: int = 2, last_steps: int = 0) -> None:
    """Writes preferences on the answers that a run rewarded most, by their gold labels
    (apps/pipeline/mine.py).

    Args:
        rollouts: a run's rollouts.jsonl, with `log.groups` groups a step.
        per_group: number of answers of each group, those with the highest rewards.
        last_steps: number of the last steps that are read; 0: all.
    """
    from compass_jax.apps.pipeline.mine import mine_file

    pairs = mine_file(rollouts, per_group, last_steps)
    empty_message = (
        f"rollouts = {rollouts!r}: no answer has a gold label, is truncated or breaks its"
        " form, so that no verdict is known; give the judged source a `gold` verifier"
    )
    _write(pairs, folder / OUTPUTS[mine_pairs], empty_message)
    print(", ".join(f"{n} {name}" for name, n in Counter(x["verdict"] for x in pairs).items()))


def merge(
    folder: Path,
    base: str,
    parents: tuple[str, ...],
    method: str = "ties",
    weights: tuple[float, ...] = (),
    density: tuple[float, ...] = (),
    scale: float = 1.0,
    routers: str = "merge",
) -> None:
    """Merges models that were trained from one base (`compass merge`)."""
    from compass_jax.apps.curate.merge import method_of, routers_from
    from compass_jax.apps.curate.merge_folders import merge_folders

    out = folder / OUTPUTS[merge]
    if out.exists():  # it exists only when complete
        return
    chosen = method_of(method, len(parents), weights or None, density or None)
    whose = routers_from(routers)
    merge_folders(base, parents, out, chosen, scale=scale, routers_from=whose, tell=print)
    print(f"written: {out}")


def evaluate(folder: Path, run: RunConfig, of: Mapping[str, str]) -> None:
    """Evaluates several weights on the same sets (`compass eval`); `of` has their paths by name."""
    from compass_jax.experience.evaluate import evaluate_weights

    for name, weights in of.items():
        if not (folder / name / SUMMARY).is_file():  # the summary is written last
            print(f"{name}:")
            evaluate_weights(run, weights, str(folder / name))


def export(folder: Path, weights: str) -> None:
    """Writes a Hugging Face folder of weights (`compass export-hf`)."""
    from compass_jax.weights.convert import export_hf

    path = export_hf(weights, folder / OUTPUTS[export], replace=True)
    print(f"written: {path}; transformers reads it by AutoModelForCausalLM")


OUTPUTS: dict[Callable[..., int | None], str] = {
    rows: "rows.jsonl",
    prepare: "train.jsonl",
    distil: "train.jsonl",
    import_gguf: "hf",
    train_judge: "rl",
    train_scalar_judge: "scalar",
    filter_prompts: "pass_rates.jsonl",
    mine_pairs: "pairs.jsonl",
    merge: "merged",
    export: "hf",
}
"""The output of each function in the stage's folder; of another function it is the folder."""
FOR_RL = (rl, train_judge, train_scalar_judge)


def _write(yielded: Iterable[JsonObject], file: Path, empty_message: str) -> None:
    """Writes rows as JSON lines. Raises ConfigError with `empty_message` for no rows."""
    count = 0
    with replaced(file) as temporary:
        with open(temporary, "w", encoding="utf-8") as out:
            for row in yielded:
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
            out.flush()
            os.fsync(out.fileno())
        if not count:
            raise ConfigError(empty_message)
    print(f"{count} rows: {file}")


def _status(result: JsonObject) -> int:
    return result["status"] if result["stopped"] else 0
