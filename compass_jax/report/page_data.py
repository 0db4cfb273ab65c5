"""Everything that a page shows of its runs, as JSON."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from compass_jax.config.data import HELDOUT
from compass_jax.report.embed import size_of
from compass_jax.report.funnel import cumulative_tokens, token_funnel
from compass_jax.report.metrics import Series, thinned
from compass_jax.report.samples import read_samples
from compass_jax.runs.metric_help import metric_help

MOST_BYTES = 9_600_000  # of a page, its code included
CODE_BYTES = 150_000
MOST_POINTS = 1_000  # of a curve
CURVE_BYTES = 2_500_000  # of all runs' curves


def page_data(
    runs: list[tuple[Path, dict[str, Series]]], now: datetime.datetime | None = None
) -> dict[str, Any]:
    """The data of a page of runs, each a folder and its stages. What does not fit into MOST_BYTES
    is left out, evenly over a run, and the page says how much.

    Raises ReportError for a damaged line of a log.
    """
    made = (now or datetime.datetime.now(datetime.UTC)).strftime("%Y-%m-%d %H:%M UTC")
    stages = [(path, stage, series) for path, found in runs for stage, series in found.items()]
    numbers = sum(len(series) for _, _, series in stages)
    points = max(50, min(MOST_POINTS, CURVE_BYTES // (10 * max(numbers, 1))))
    names = _names([path for path, _ in runs])
    shown = [
        _stage(path, names[str(path)], stage, series, points, len(runs[i][1]) > 1)
        for i, (path, found) in enumerate(runs)
        for stage, series in found.items()
    ]
    logged = sorted({name for _, _, series in stages for name in series})
    sentences = {name: said for name in logged if (said := metric_help(name))}
    data = {"made": made, "help": sentences, "runs": shown}
    room = MOST_BYTES - CODE_BYTES - size_of(data)
    for i, (entry, (path, stage, _)) in enumerate(zip(shown, stages, strict=True)):
        # what one run does not need is the next one's
        entry["groups"], entry["logged"] = read_samples(path, stage, room // (len(stages) - i))
        entry["has_tokens"] = (path / "tokens.jsonl").is_file()
        room -= size_of(entry["groups"])
    return data


def _stage(
    path: Path, name: str, stage: str, series: Series, points: int, several: bool
) -> dict[str, Any]:
    config, notes = _config(path)
    curves = thinned(series, points)
    last = curves["steps"][-1]
    wanted = _at(config, stage, "steps") if stage in ("rl", "sft") else None
    cut = [log for log in ("metrics", "rollouts", "tokens") if _cut(path / f"{log}.jsonl")]
    notes += [f"The last line of {log}.jsonl has no end; it is left out." for log in cut]
    bad = sum(x["bad"] > 0 for x in curves["metrics"].values())
    if bad:
        notes.append(f"{bad} metrics have values that are not finite; their curves have gaps.")
    return {
        "name": f"{name}: {stage}" if several else name,
        "path": str(path),
        "stage": stage,
        "last": last,
        "wanted": wanted if isinstance(wanted, int) else None,
        "facts": _facts(config, stage) + (_heldout(path) if stage == "rl" else []),
        "clip": _at(config, "rl", "objective"),
        "notes": notes,
        "curves": curves,
        "tokens": cumulative_tokens(series, curves["steps"]),
        "funnel": token_funnel(series) if stage == "rl" else None,
    }


def _names(paths: list[Path]) -> dict[str, str]:
    """Path -> the shortest end of it that no other run has."""
    names = {}
    for path in paths:
        parts = path.absolute().parts
        for n in range(min(2, len(parts)), len(parts) + 1):
            names[str(path)] = "/".join(parts[-n:]).replace("//", "/")
            others = [x.absolute().parts[-n:] for x in paths if x != path]
            if parts[-n:] not in others:
                break
    return names


def _config(path: Path) -> tuple[dict[str, Any], list[str]]:
    """(config.json as it stands, of whatever version; notes)."""
    try:
        found = json.loads((path / "config.json").read_text("utf-8", errors="replace"))
        if isinstance(found, dict):
            return found, []
    except FileNotFoundError:
        return {}, ["The run has no config.json: its settings are not known."]
    except (OSError, ValueError, RecursionError):
        pass
    return {}, ["config.json cannot be read: the run's settings are not known."]


def _cut(path: Path) -> bool:
    """Whether a log's last line has no end."""
    try:
        with open(path, "rb") as file:
            if file.seek(0, 2) == 0:
                return False
            file.seek(-1, 2)
            return file.read(1) != b"\n"
    except OSError:
        return False


def _at(config: dict[str, Any], *keys: str) -> Any:
    """A setting, None where the file has none."""
    found: Any = config
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _facts(config: dict[str, Any], stage: str) -> list[tuple[str, str]]:
    """What a reader asks first of a run's settings: (name, words)."""
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


def _heldout(path: Path) -> list[tuple[str, str]]:
    """The accuracy after the last step of a run that has ended."""
    try:
        found = json.loads((path / "evaluation.json").read_text("utf-8"))
        step, metrics = int(found["step"]), found["metrics"]
        words = {
            name: f"{float(metrics[f'eval/{HELDOUT}/{key}']):.3f}"
            for name, key in (("avg@k", "avg_at_k"), ("greedy", "greedy"), ("reward", "reward"))
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [(f"held-out, step {step}", ", ".join(f"{x} {y}" for x, y in words.items()))]


def _count(n: Any, what: str) -> str:
    return f"{n} {what}" if n else ""
