"""The data of a page of runs, as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator
from pathlib import Path

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.config import RunConfig
from compass_jax.config.io import to_plain
from compass_jax.runs.logfile import log_parts
from compass_jax.runs.machine import read_machine
from compass_jax.runs.metric_table import PANELS, metric_help
from compass_jax.runs.report.embed import size_of
from compass_jax.runs.report.funnel import cumulative_tokens, token_funnel
from compass_jax.runs.report.heldout import evaluation_answers, evaluations
from compass_jax.runs.report.metrics import (
    Series,
    heat_map,
    hours,
    read_histograms,
    read_object,
    thinned,
)
from compass_jax.runs.report.samples import read_samples

MOST_BYTES = 9_600_000  # maximum bytes of a page, its code included
CODE_BYTES = 150_000
MOST_POINTS = 1_000  # maximum points of a curve
MOST_SETTING = 600  # maximum characters of a setting's value
CURVE_BYTES = 2_500_000  # maximum bytes of all runs' curves
ANSWER_BYTES = 1_200_000  # maximum bytes of all runs' evaluation answers


def page_data(runs: list[tuple[Path, dict[str, Series]]], again_s: float = 0) -> JsonObject:
    """Returns the data of a page of runs, each a folder and its stages. Groups beyond MOST_BYTES
    are left out, evenly over a run, and counted.

    again_s: seconds after which a rewritten page reloads itself; 0: never.

    Raises ReportError for a damaged line of a log.
    """
    written_at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    stages = [
        (path, stage, series) for path, run_stages in runs for stage, series in run_stages.items()
    ]
    numbers = sum(len(series) for _, _, series in stages)
    points = max(50, min(MOST_POINTS, CURVE_BYTES // (10 * max(numbers, 1))))
    names = _names([path for path, _ in runs])
    entries = [
        _stage(path, names[str(path)], stage, series, points, len(runs[i][1]) > 1)
        for i, (path, run_stages) in enumerate(runs)
        for stage, series in run_stages.items()
    ]
    logged = sorted({name for _, _, series in stages for name in series})
    sentences = {name: metric for name in logged if (metric := metric_help(name))}
    panels = {name: [panel._asdict() for panel in section] for name, section in PANELS.items()}
    data = {
        "made": written_at,
        "help": sentences,
        "panels": panels,
        "runs": entries,
        "again_s": again_s,
    }
    for entry, (path, stage, _) in zip(entries, stages, strict=True):
        part = ANSWER_BYTES // len(stages) if stage == "rl" else 0
        entry["answers"], entry["answered"] = evaluation_answers(path, part)
    room = MOST_BYTES - CODE_BYTES - size_of(data)
    for i, (entry, (path, stage, _)) in enumerate(zip(entries, stages, strict=True)):
        # room that one run leaves is available to the next
        entry["groups"], entry["logged"] = read_samples(path, stage, room // (len(stages) - i))
        entry["has_tokens"] = (path / "tokens.jsonl").is_file()
        room -= size_of(entry["groups"])
    return data


def _stage(
    path: Path, name: str, stage: str, series: Series, points: int, several: bool
) -> JsonObject:
    config, notes = _config(path)
    curves = thinned(series, points)
    last = curves["steps"][-1]
    planned_steps = _at(config, stage, "steps") if stage in ("rl", "sft") else None
    cut = [log for log in ("metrics", "rollouts", "tokens") if _cut(path / f"{log}.jsonl")]
    notes += [f"The last line of {log}.jsonl has no end; it is left out." for log in cut]
    bad = sum(x["bad"] > 0 for x in curves["metrics"].values())
    if bad:
        which = "metric has" if bad == 1 else "metrics have"
        notes.append(f"{bad} {which} values that are not finite: gaps in the curves.")
    return {
        "name": f"{name}: {stage}" if several else name,
        "path": str(path),
        "stage": stage,
        "last": last,
        "wanted": planned_steps if isinstance(planned_steps, int) else None,
        "facts": _facts(config, stage),
        "settings": _settings(config),
        "machine": [(name, str(x)) for name, x in read_machine(path).items()],
        "heldout": evaluations(path, series) if stage == "rl" else {},
        "histograms": {
            name: heat_map(by_step)
            for name, by_step in read_histograms(path / "metrics.jsonl", stage).items()
        },
        "hours": hours(series, curves["steps"]),
        "clip": _at(config, "rl", "objective"),
        "notes": notes,
        "curves": curves,
        "tokens": cumulative_tokens(series, curves["steps"]),
        "funnel": token_funnel(series) if stage == "rl" else None,
    }


def _names(paths: list[Path]) -> dict[str, str]:
    """Returns path -> the shortest suffix of it that is unique among the runs."""
    names = {}
    for path in paths:
        parts = path.absolute().parts
        for n in range(min(2, len(parts)), len(parts) + 1):
            names[str(path)] = "/".join(parts[-n:]).replace("//", "/")
            suffixes = [x.absolute().parts[-n:] for x in paths if x != path]
            if parts[-n:] not in suffixes:
                break
    return names


def _config(path: Path) -> tuple[JsonObject, list[str]]:
    """Returns (config.json of any version, notes)."""
    file = path / "config.json"
    if config := read_object(file):
        return config, []
    missing = "config.json cannot be read" if file.exists() else "The run has no config.json"
    return {}, [f"{missing}: the run's settings are not known."]


def _cut(path: Path) -> bool:
    """Returns whether a log's last line is incomplete."""
    try:
        with open([path, *log_parts(path)][-1], "rb") as file:
            if file.seek(0, 2) == 0:
                return False
            file.seek(-1, 2)
            return file.read(1) != b"\n"
    except OSError:
        return False


def _at(config: JsonObject, *keys: str) -> Json:
    """Returns a setting, or None if the file does not have it."""
    value: Json = config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _facts(config: JsonObject, stage: str) -> list[tuple[str, str]]:
    """Returns (name, text) of the main settings of a run."""
    experts = _at(config, "model", "moe", "experts")
    model = [_at(config, "model", "family"), _count(_at(config, "model", "layers"), "layers")]
    model += [_count(_at(config, "model", "hidden"), "wide"), _count(experts, "experts")]
    facts = [("model", ", ".join(str(x) for x in model if x))]
    if stage == "rl":
        prompts, samples = _at(config, "rl", "prompts_per_step"), _at(config, "rl", "group_size")
        facts += [
            ("objective", str(_at(config, "rl", "objective", "name") or "")),
            ("router replay", str(_at(config, "rl", "replay") or "")),
            ("a step", f"{prompts} prompts x {samples} samples" if prompts and samples else ""),
            ("updates a step", str(_at(config, "rl", "updates_per_rollout") or "")),
        ]
    facts.append(("seed", "" if _at(config, "seed") is None else str(_at(config, "seed"))))
    return [(name, words[:200]) for name, words in facts if words]


def _settings(config: JsonObject) -> list[tuple[str, str, bool]]:
    """Returns (name, value, whether it is not the default) of every setting in a config.json."""
    usual: dict[str, str] = {}
    for field in dataclasses.fields(RunConfig):
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
            plain = to_plain(default) if dataclasses.is_dataclass(default) else default
            usual |= dict(_leaves(plain, field.name))
        elif field.default is not dataclasses.MISSING:
            usual[field.name] = json.dumps(field.default, default=str)
    return [
        (name, value[:MOST_SETTING], name in usual and usual[name] != value)
        for name, value in _leaves(config)
    ]


def _leaves(value: Json, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted name, JSON) of the settings of a part; a list is one setting."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _leaves(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(value, ensure_ascii=False)


def _count(n: Json, what: str) -> str:
    return f"{n} {what}" if n else ""
