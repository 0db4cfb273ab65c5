"""Experiment: whether prompts of a file without labels are chosen as well as with labels, and what
each prompt then teaches.

    python -m benchmarks.unlabelled predictors [--seeds 200 201] [--out runs/unlabelled]
    python -m benchmarks.unlabelled predictors --smoke

The task is that of configs/mostly_hard_cpu.py, of whose prompts 58% are too hard, but every prompt
has the same label, as in one JSONL file. The cold starts have other seeds than all earlier runs.

`predictors`, written before its runs. 60 steps of the demo's recipe (16 prompts, screening 2 of 4,
rate 7.5e-5) for each predictor:
    labels       by label, with the labels of the sources: what the others are to reach
    one label    by label, without them: what a file without labels had before
    text         by the prompt's text
    state        by the policy's hidden state of the prompt
At the end 400 training prompts that no step drew get 16 fresh answers each. A row has their log
loss under the predictions (and under the rate of all of them, and under each label's), the share of
outcomes within the 90% intervals, the share of impossible prompts among those drawn in the first
epoch (the steps do not finish one), and the minutes of selection, features included.

The goals: a log loss at least half of the way from the global rate to the labels' prediction,
intervals that hold 85 to 95%, at most 15% impossible prompts. A line per finished run goes to
OUT/unlabelled_predictors.jsonl; runs with a line are skipped.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from benchmarks import experiments, rl_runs
from benchmarks.tokens_to_accuracy import base_config, cold_start
from compass_jax.apps.pipeline.offline_filter import FILE, Bounds, run_filter
from compass_jax.base.records import Prompt
from compass_jax.commands.configs.mostly_hard_cpu import TOO_HARD
from compass_jax.config import OptimConfig, ProceduralSource, RunConfig, ZeroVarianceConfig
from compass_jax.data.keep import PassRate, read_pass_rates
from compass_jax.data.posterior import PosteriorSelector, coverage
from compass_jax.data.predictors.label import Label
from compass_jax.data.predictors.state import State
from compass_jax.data.predictors.text import Text
from compass_jax.data.prompts import train_prompts
from compass_jax.data.stream import PromptStream
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.devices.allocator import tune_allocator
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.building import Building
from compass_jax.training.loop import RLTrainer
from compass_jax.training.rl import rl_steps

RESULTS = "unlabelled_predictors.jsonl"
ARMS = {"labels": Label(), "one label": Label(), "text": Text(), "state": State()}
STEPS, FRESH_PROMPTS, FRESH_SAMPLES = 60, 400, 16
SMOKE = 3, 8, 2
ONE_LABEL = "file"


def without_labels(config: RunConfig) -> RunConfig:
    """Returns a configuration whose training prompts have one label."""
    sources = []
    for source in config.data.sources:
        assert isinstance(source, ProceduralSource)
        sources.append(dataclasses.replace(source, label=ONE_LABEL))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, sources=(*sources,)))


def configured(seed: int, arm: str, out: Path, smoke: bool) -> RunConfig:
    """Returns the run of an arm, which begins at the seed's cold start."""
    base = base_config(seed, out / f"seed{seed}", smoke)
    cold_start(base)
    config = base if arm == "labels" else without_labels(base)
    rl = dataclasses.replace(
        base.rl,
        steps=SMOKE[0] if smoke else STEPS,
        prompts_per_step=4 if smoke else 16,
        group_size=4,
        step_policy=Screening(n0=2),
        zero_variance=ZeroVarianceConfig(posterior=True),
        predictor=ARMS[arm],
        optim=OptimConfig(learning_rate=7.5e-5, warmup_steps=8),
    )
    directory = str(out / f"seed{seed}" / f"predictor_{arm.replace(' ', '_')}")
    data = dataclasses.replace(config.data, eval_prompts=0)
    return dataclasses.replace(
        config, rl=rl, data=data, run_dir=directory, init_from=base.directory
    )


class Watched:
    """What a run draws: the questions, and the seconds of each draw, features included."""

    def __init__(self) -> None:
        self.trainer: RLTrainer | None = None  # once it is made
        self.questions: list[str] = []
        self.seconds: list[float] = []

    @contextmanager
    def watching(self, made: Callable[[RLTrainer], None] = lambda trainer: None) -> Iterator[None]:
        """Watches the trainer that is built within, after `made` was called with it."""
        original = Building.trainer

        def trainer(building: Building) -> RLTrainer:
            self.trainer = original(building)
            made(self.trainer)
            selector = self.trainer.parts.prompts.selector
            drawing = selector.next_batch

            def next_batch(stream: PromptStream, n: int) -> list[Prompt]:
                started = time.perf_counter()
                prompts = drawing(stream, n)
                self.seconds.append(time.perf_counter() - started)
                self.questions += [prompt.question for prompt in prompts]
                return prompts

            selector.next_batch = next_batch  # type: ignore[method-assign]
            return self.trainer

        Building.trainer = trainer  # type: ignore[method-assign]
        try:
            yield
        finally:
            Building.trainer = original  # type: ignore[method-assign]


class Predicted:
    """What a run's selector says of prompts that it has not drawn, at the end of the run."""

    def __init__(self, config: RunConfig, count: int):
        self.config, self.count, self.drawn = config, count, Watched()
        self.prompts: list[Prompt] = []
        self.posteriors = np.zeros((0, 2))

    def train(self) -> None:
        """Trains, and asks the selector after the last step."""
        with self.drawn.watching():
            for step in rl_steps(self.config):
                if step.number == self.config.rl.steps:
                    assert self.drawn.trainer is not None
                    self.ask(self.drawn.trainer)

    def ask(self, trainer: RLTrainer) -> None:
        """Stores the posteriors of unseen training prompts."""
        selector = trainer.parts.prompts.selector
        assert isinstance(selector, PosteriorSelector)
        drawn = {*self.drawn.questions}
        unseen = [x for x in training_prompts(self.config) if x.question not in drawn]
        rng = np.random.default_rng(self.config.seed)
        chosen = np.sort(rng.choice(len(unseen), min(self.count, len(unseen)), replace=False))
        self.prompts = [unseen[i] for i in chosen]
        selector.prediction.prepare(self.prompts)
        self.posteriors = selector.posteriors(self.prompts)


def training_prompts(config: RunConfig) -> list[Prompt]:
    """Returns the prompts that a run draws from."""
    tokenizer = load_tokenizer(config.data, config.model.vocab_size)
    return train_prompts(config.data, tokenizer, config.seed, lambda _: None)


def fresh_rates(config: RunConfig, prompts: Sequence[Prompt], samples: int) -> np.ndarray:
    """Returns the share of right answers of the last policy to each prompt, NaN where unknown."""
    folder = Path(config.directory) / "fresh"
    folder.mkdir(exist_ok=True)
    kept, file = {x.id for x in prompts}, folder / "prompts.jsonl"
    kept_only = keeping(config, file, lambda prompt: prompt.id in kept)
    scored, place = (kept_only.policy, kept_only.scored), (config.directory, str(folder))
    run_filter(*scored, *place, Bounds(samples))
    rates = read_pass_rates(folder / FILE)
    return np.array([rates[x.id].pass_rate if rates[x.id].known else np.nan for x in prompts])


def keeping(config: RunConfig, file: Path, keeps: Callable[[Prompt], bool]) -> RunConfig:
    """Returns the configuration with those training prompts alone that `keeps` accepts; `file`
    lists them.
    """
    rows = (
        PassRate(x.id, x.label, x.question, 0.0, 0, 1, 0, 0.0, 1.0, keeps(x))
        for x in training_prompts(config)
    )
    write_atomically(file, "".join(json.dumps(row._asdict()) + "\n" for row in rows))
    data = dataclasses.replace(config.data, keep_file=str(file))
    return dataclasses.replace(config, data=data)


def log_loss(mean: np.ndarray, rates: np.ndarray) -> float:
    """Returns the mean log loss of an answer in nats."""
    mean = np.clip(mean, 1e-4, 1 - 1e-4)
    return float(-np.mean(special.xlogy(rates, mean) + special.xlog1py(1 - rates, -mean)))


def run(seed: int, arm: str, out: Path, smoke: bool) -> dict[str, Any]:
    """Trains an arm, unless it is trained, and returns its row."""
    started, config = time.perf_counter(), configured(seed, arm, out, smoke)
    _, count, samples = SMOKE if smoke else (STEPS, FRESH_PROMPTS, FRESH_SAMPLES)
    labels = {x.question: x.label for x in training_prompts(base_config(seed, out, smoke))}
    hard = {source.label for source in base_config(seed, out, smoke).data.sources[-len(TOO_HARD) :]}
    predicted = Predicted(config, count)
    predicted.train()
    rates = fresh_rates(config, predicted.prompts, samples)
    known = np.isfinite(rates)
    rates, (alpha, beta) = rates[known], predicted.posteriors[known].T
    kinds = np.array([labels[x.question] for x in predicted.prompts])[known]
    by_label = np.array([rates[kinds == kind].mean() for kind in kinds])
    inside = coverage(rates * samples, np.full(len(rates), samples), alpha, beta)
    experiments.forget_compiled()
    return {
        "seed": seed,
        "arm": arm,
        "commit": experiments.commit(),
        "steps": config.rl.steps,
        "prompts": len(rates),
        "log_loss": log_loss(alpha / (alpha + beta), rates),
        "log_loss_global": log_loss(np.full(len(rates), rates.mean()), rates),
        "log_loss_of_labels_rates": log_loss(by_label, rates),
        "coverage_90": float(inside.mean()),
        "impossible_drawn": float(np.mean([labels[x] in hard for x in predicted.drawn.questions])),
        "impossible_in_pool": float(np.mean([x in hard for x in labels.values()])),
        "selection_minutes": round(sum(predicted.drawn.seconds) / 60, 3),
        "minutes": round((time.perf_counter() - started) / 60, 2),
    }


def main(argv: list[str] | None = None) -> None:
    """Runs the arms that have no row yet, and prints all rows."""
    if argv is None:
        tune_allocator()
        keep_programs()
    parser = rl_runs.parser(__doc__ or "", "unlabelled", seeds=(200, 201), variants=(*ARMS,))
    parser.add_argument("part", choices=("predictors",))
    args = parser.parse_args(argv)
    file = Path(args.out) / RESULTS
    for seed in args.seeds:
        for arm in args.only:
            rows = experiments.finished(file)
            if (seed, arm) not in {(row["seed"], row["arm"]) for row in rows}:
                experiments.append(file, run(seed, arm, Path(args.out), args.smoke))
    for row in experiments.finished(file):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
