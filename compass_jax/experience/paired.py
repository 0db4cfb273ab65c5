"""Comparison of two evaluations of the same prompts: paired differences, their intervals and tests.

Pairing removes the prompts' difficulty from the error, so that the difference of two accuracies is
known better than either of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.base.untrusted import parse_json, read_lines, read_text
from compass_jax.experience.accuracy import Evaluation
from compass_jax.experience.estimators import clustered, sign_test
from compass_jax.runs.report import ReportError
from compass_jax.runs.rundir import ANSWERS, EVALUATION_FOLDER, SUMMARY

SIGN, T_TEST = "McNemar's, exact", "paired t"
BOOTSTRAP_SEED = 0
MAX_ROW_BYTES = 2**30  # of a prompt with all its answers

Key = tuple[str, int, str]  # set, id, prompt


class Judged(NamedTuple):
    """The verdicts on a prompt's answers."""

    right: int  # of the samples
    known: int
    greedy: bool | None  # whether the greedy answer is right, None where unknown
    reward: float  # the sum of the samples' known rewards


@dataclass(frozen=True)
class EvaluationFiles:
    """The content of an evaluation's files."""

    folder: str
    settings: JsonObject  # of all sets
    sets: dict[str, JsonObject]  # of summary.json
    answers: dict[Key, Judged]


def read_evaluation(place: str) -> EvaluationFiles:
    """Reads the evaluation in a folder that `compass eval --out` wrote, or in the directory of a
    finished run. Raises ReportError for another folder or damaged files.
    """
    folders = [Path(place), Path(place) / EVALUATION_FOLDER]
    folder = next((one for one in folders if (one / ANSWERS).is_file()), None)
    if folder is None:
        raise ReportError(
            f"{place}: there is no {ANSWERS}; name a folder that `compass eval --out` wrote, or the"
            " directory of a training run that has ended and evaluates"
        )
    file = folder / SUMMARY
    summary = parse_json(read_text(file, error=ReportError), str(file), error=ReportError)
    try:
        sets, settings = dict(summary["sets"]), dict(summary["settings"])
        right_at = float(settings["right_at"])
        used = {name: {"k": x["k"], "temperature": x["temperature"]} for name, x in sets.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ReportError(
            f"{file}: no summary of an evaluation with sets ({error!r}); evaluate again"
        ) from error
    answers = {}
    lines = read_lines(folder / ANSWERS, error=ReportError, most_bytes=MAX_ROW_BYTES)
    for where, line in lines:
        key, judged = _read(line, where, used, right_at)
        answers[key] = judged
    return EvaluationFiles(place, settings, used, answers)


def read_summary(folder: Path) -> Evaluation:
    """Returns the held-out accuracies in the summary.json of a folder, without its labels and sets.
    Raises ReportError without such a summary.
    """
    file = folder / SUMMARY
    summary = parse_json(read_text(file, error=ReportError), str(file), error=ReportError)
    try:
        return Evaluation(
            int(summary["k"]),
            int(summary["prompts"]),
            _number(summary["avg_at_k"]),
            _number(summary["pass_at_k"]),
            _number(summary["greedy"]),
            int(summary["unscored"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ReportError(f"{file}: no summary of an evaluation ({error!r})") from error


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _read(line: bytes, where: str, sets: JsonMapping, right_at: float) -> tuple[Key, Judged]:
    try:
        row = parse_json(line, where, error=ReportError)
        # The last sample is the greedy answer (evaluated.answer_rows).
        (*samples, best) = row["samples"]
        key = (row["set"], int(row["id"]), row["prompt"])
        known = [float(x["reward"]) for x in samples if x["outcome"] == "ok"]
        greedy = float(best["reward"]) >= right_at if best["outcome"] == "ok" else None
        if len(samples) != sets[row["set"]]["k"]:
            raise ValueError(f"{len(samples)} samples, and k = {sets[row['set']]['k']}")
    except (KeyError, TypeError, ValueError) as error:
        # It is a ValueError too, and its message already names the place.
        if isinstance(error, ReportError):
            raise
        raise ReportError(
            f"{where}: no answers of an evaluation with sets ({error!r}); evaluate again"
        ) from error
    return key, Judged(sum(x >= right_at for x in known), len(known), greedy, sum(known))


def compare(first: EvaluationFiles, second: EvaluationFiles) -> JsonObject:
    """Compares two evaluations, for each set that both have: the matching prompts, and on these
    both values of avg@k, mean reward and greedy accuracy, the difference from first to second with
    its 95% interval, and the p of a test of no difference. Values have JSON types; None for an
    unknown one.

    Raises ReportError where no prompt matches, or where sampling or judging settings differ, with
    their names.
    """
    _check_same(first, second)
    names = [name for name in first.sets if name in second.sets]
    sets = {}
    for name in names:
        answers, other_answers = (
            {key: x for key, x in one.answers.items() if key[0] == name} for one in (first, second)
        )
        matched = [key for key in answers if key in other_answers]
        if matched:
            pairs = [(answers[key], other_answers[key]) for key in matched]
            sets[name] = {
                **first.sets[name],
                "matched": len(matched),
                "only_first": len(answers) - len(matched),
                "only_second": len(other_answers) - len(matched),
                "avg_at_k": averages([((a.right, a.known), (b.right, b.known)) for a, b in pairs]),
                "reward": averages([((a.reward, a.known), (b.reward, b.known)) for a, b in pairs]),
                "greedy": greedies([(a.greedy, b.greedy) for a, b in pairs]),
            }
    if not sets:
        raise ReportError(
            f"no prompt is in both {first.folder} ({', '.join(first.sets)}) and {second.folder}"
            f" ({', '.join(second.sets)}): a comparison needs the same sets with the same prompts"
        )
    only = {name: one.folder for one in (first, second) for name in one.sets if name not in names}
    return {"first": first.folder, "second": second.folder, "sets": sets, "only": only}


def _check_same(first: EvaluationFiles, second: EvaluationFiles) -> None:
    pairs = [("", first.settings, second.settings)]
    pairs += [(f"{x}: ", first.sets[x], second.sets[x]) for x in first.sets if x in second.sets]
    differences = [
        f"{where}{key} = {one.get(key)!r:.60} and {other.get(key)!r:.60}"
        for where, one, other in pairs
        for key in dict.fromkeys([*one, *other])
        if one.get(key) != other.get(key)
    ]
    if differences:
        raise ReportError(
            f"{first.folder} and {second.folder} were evaluated under other settings, so that their"
            f" difference would not measure the weights: {'; '.join(differences)}; evaluate one of"
            " them again"
        )


def averages(pairs: list[tuple[tuple[float, int], tuple[float, int]]]) -> JsonObject:
    """Returns the difference of avg@k or of the mean reward over prompts, each with equal weight:
    its bootstrap interval over prompts and the p of the paired t-test. `pairs` has ((sum, known),
    (sum, known)) of each prompt; prompts that one side has no known score of are left out.
    """
    known = [(a / n, b / m) for (a, n), (b, m) in pairs if n and m]
    sides = np.array(known, float).reshape(-1, 2)
    gains = sides[:, 1] - sides[:, 0]
    ones = np.ones(len(gains), int)
    largest = max(1.0, float(np.ptp(sides))) if known else 1.0  # rewards may differ by more than 1
    estimate = clustered(gains, ones, BOOTSTRAP_SEED, support=(-largest, largest))
    values = (*map(float, sides.mean(0)), estimate.mean) if known else (math.nan,) * 3
    return _comparison(len(known), values, (estimate.low, estimate.high), _t_test(gains), T_TEST)


def _t_test(gains: np.ndarray) -> float:
    """Returns the two-sided p of a mean of zero; NaN for fewer than two values. Where all are
    equal, the t-test has no error estimate and the sign test is used.
    """
    from scipy import stats  # type: ignore[import-untyped]  # untyped

    if len(gains) < 2:
        return math.nan
    if np.ptp(gains) == 0:
        return sign_test(0, len(gains) if gains[0] else 0)
    return float(stats.ttest_1samp(gains, 0.0).pvalue)


def greedies(pairs: list[tuple[bool | None, bool | None]]) -> JsonObject:
    """Returns the difference of greedy accuracy: its bootstrap interval over prompts, and the p of
    McNemar's exact test on the prompts that only one side gets right. Unknown answers are left out.
    """
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    sides = np.array(known, float).reshape(-1, 2)
    gains = sides[:, 1] - sides[:, 0]
    estimate = clustered(gains, np.ones(len(gains), int), BOOTSTRAP_SEED, support=(-1.0, 1.0))
    values = (*map(float, sides.mean(0)), estimate.mean) if known else (math.nan,) * 3
    p = sign_test(int((gains < 0).sum()), int((gains > 0).sum())) if known else math.nan
    return _comparison(len(known), values, (estimate.low, estimate.high), p, SIGN)


def _comparison(
    prompts: int,
    values: tuple[float, ...],
    interval: tuple[float, float],
    p: float,
    test: str,
) -> JsonObject:
    plain = [x if math.isfinite(x) else None for x in (*values, *interval, p)]
    first, second, difference, low, high, p_value = plain
    return {
        "prompts": prompts,
        "first": first,
        "second": second,
        "difference": difference,
        "interval": [low, high],
        "p": p_value,
        "test": test,
    }
