"""`compass data --predict`: the training prompts by their predicted pass rates, before any
training, from outcomes that a filter or an earlier run measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from scipy import special

from compass_jax.base.records import Prompt
from compass_jax.config import RewardConfig, RunConfig
from compass_jax.data.files import DataError
from compass_jax.data.keep import read_pass_rates
from compass_jax.data.predictors.inputs import Prediction, PredictorInputs, Seen
from compass_jax.data.prompts import train_prompts
from compass_jax.data.questions import unique_notices
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.runs.report.samples import read_groups
from compass_jax.runs.screen import text_lines

FOLDS = 5  # parts, each predicted from the others
LEAST = 10  # measured prompts from which the others' prediction says something
BANDS = 10
BAR, WIDTH = 40, 100


def run_predict(
    config: RunConfig, path: str, most: int, line: Callable[[str], None] = print
) -> None:
    """Prints how well `rl.predictor` predicts each measured prompt from the others, all training
    prompts by predicted rate, and the `most` hardest, middle and easiest ones.

    path: pass_rates.jsonl of `compass filter`, or the directory of a run.

    Raises DataError without outcomes of the training prompts, and for a predictor that computes
    with the policy.
    """
    if config.rl.predictor.reads_policy:
        raise DataError(
            f"--predict {path}: rl.predictor {config.rl.predictor.name} computes with the policy,"
            " which this command does not load; --rl.predictor text predicts without"
        )
    tokenizer = load_tokenizer(config.data, config.model.vocab_size)
    prompts = train_prompts(config.data, tokenizer, config.seed, unique_notices(line))
    seen = outcomes(path, prompts, config.rewards)
    answers = int(seen.judged.sum())
    line(
        f"predicted by {config.rl.predictor.name}, from {answers:,} answers to"
        f" {len(seen.prompts):,} of {len(prompts):,} prompts ({path})"
    )

    def start() -> Prediction:
        return config.rl.predictor.start(PredictorInputs(prompts, config.seed))

    if len(seen.prompts) >= LEAST:
        line(_losses(start, seen))
    prediction = start()
    prediction.fit(seen)
    alpha, beta = prediction.priors(prompts).T
    place = {prompt.id: i for i, prompt in enumerate(prompts)}
    at = [place[prompt.id] for prompt in seen.prompts]
    alpha[at], beta[at] = alpha[at] + seen.right, beta[at] + seen.judged - seen.right
    _show(prompts, alpha / (alpha + beta), most, line)


def outcomes(path: str, prompts: Sequence[Prompt], rewards: RewardConfig) -> Seen:
    """Returns the outcomes of those training prompts that `path` measured."""
    known = {prompt.question: prompt for prompt in prompts}
    counts: dict[str, Float[np.ndarray, " 2"]] = {}
    for question, right, judged in _measured(path, rewards):
        if judged and question in known:
            counts[question] = counts.get(question, np.zeros(2)) + np.array((right, judged))
    if not counts:
        raise DataError(
            f"--predict {path}: it has no judged answer to a training prompt of this data; give the"
            " run or the pass rates of the same data"
        )
    right, judged = np.array([*counts.values()]).T
    return Seen([known[question] for question in counts], right, judged)


def _measured(path: str, rewards: RewardConfig) -> list[tuple[str, float, float]]:
    """Returns (question, right, judged) of each line."""
    if Path(path).is_file():
        rows = read_pass_rates(path).values()
        return [(row.question, row.pass_rate * row.known, float(row.known)) for row in rows]
    low, high = rewards.wrong_at, rewards.right_at
    measured = []
    for group in read_groups(path):
        scores = [x["reward"] for x in group["samples"] if x["outcome"] == "ok"]
        rates = np.clip((np.array(scores, float) - low) / (high - low), 0, 1)
        measured.append((str(group["prompt"]), float(rates.sum()), float(len(rates))))
    return measured


def _losses(start: Callable[[], Prediction], seen: Seen) -> str:
    """Returns a line with the log loss of each prompt's outcomes, predicted from those of the other
    folds, beside that of one rate for all.
    """
    fold = np.arange(len(seen.prompts)) % FOLDS
    predicted, common = np.zeros(len(fold)), np.zeros(len(fold))
    for one in range(FOLDS):
        out = fold == one
        right, judged = seen.right[~out], seen.judged[~out]
        prediction = start()
        prediction.fit(
            Seen([x for x, is_out in zip(seen.prompts, out) if not is_out], right, judged)
        )
        alpha, beta = prediction.priors([x for x, is_out in zip(seen.prompts, out) if is_out]).T
        predicted[out] = alpha / (alpha + beta)
        common[out] = (right.sum() + 1) / (judged.sum() + 2)
    by_prompt, by_all = (_log_loss(rates, seen) for rates in (predicted, common))
    verdict = "tells prompts apart" if by_prompt < by_all else "tells nothing about new prompts"
    return (
        f"each prompt predicted from the others: log loss {by_prompt:.3f} nats an answer, by one"
        f" rate for all {by_all:.3f}: it {verdict}"
    )


def _log_loss(rates: Float[np.ndarray, " n"], seen: Seen) -> float:
    rates, wrong = np.clip(rates, 1e-4, 1 - 1e-4), seen.judged - seen.right
    loss = special.xlogy(seen.right, rates) + special.xlog1py(wrong, -rates)
    return -float(loss.sum() / seen.judged.sum())


def _show(
    prompts: Sequence[Prompt],
    rates: Float[np.ndarray, " n"],
    most: int,
    line: Callable[[str], None],
) -> None:
    counts = np.histogram(rates, BANDS, (0, 1))[0]
    line("predicted pass rate, prompts")
    for i, count in enumerate(counts):
        bar = "█" * round(BAR * count / counts.max())
        line(f"  {10 * i:3} to {10 * i + 10:3}%  {count:9,} {bar}".rstrip())
    order = np.argsort(rates, kind="stable")
    middle = np.argsort(np.abs(rates - 0.5), kind="stable")
    parts = {"lowest": order, "nearest to 50%": middle, "highest": order[::-1]}
    for name, part in parts.items() if most else ():
        line(f"{name}:")
        for i in part[:most]:
            line(text_lines(f"{rates[i]:.0%}", prompts[i].question, WIDTH, 1)[0])
