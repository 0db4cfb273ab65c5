"""avg@k, pass@k and greedy accuracy on held-out prompts, through the same rollout and the same
verifiers as training.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from rich.console import Console

from compass_jax.config import ConfigError, RolloutConfig, RunConfig
from compass_jax.data.prompts import fitting, heldout_prompts
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.turns import turn_encoder
from compass_jax.distributed import is_main_process
from compass_jax.experience.judged import (
    extracted_frac,
    group_shares,
    sample_of,
    silence,
    silence_warning,
)
from compass_jax.experience.metrics import sample_rows
from compass_jax.experience.turns import Turns
from compass_jax.model.params import abstract_params, shardings_like
from compass_jax.records import Group, Prompt, Rollout, Score
from compass_jax.report import summary_table
from compass_jax.rewards.detect import notice
from compass_jax.rewards.shared import AnyScorer
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.programs import Use
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.runs.rundir import FolderLock, write_atomically
from compass_jax.sharding import placements
from compass_jax.tasks.task import talks
from compass_jax.training.session import load_tokenizer, open_scorer
from compass_jax.weights.start import init_or_load
from compass_jax.weights.sync import sync_weights

ANSWERS = "answers.jsonl"
MOST_VALUES = 32  # of a row's domain, language or difficulty in the accuracy table


@dataclass(frozen=True)
class Evaluation:
    """Accuracies in [0, 1] over prompts; `labels` has (prompts, avg@k, greedy) of each label, those
    of the sources first, then those of the rows ("domain/algebra"). Unknown scores are left out and
    counted.
    """

    k: int
    prompts: int
    avg_at_k: float
    pass_at_k: float
    greedy: float
    unknown: int
    labels: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    # of the k samples: responses in which an answer was found, and groups by kind
    extracted: float = math.nan
    kinds: dict[str, float] = field(default_factory=dict)
    warning: str = ""  # where no answer was found, or none is right: with a sample
    reward: float = math.nan  # mean of the k samples' rewards
    right_at: float = 1.0  # an answer with at least this reward is right

    def line(self) -> str:
        """The accuracies in one line, and the mean reward where some are neither right nor 0."""
        sampled = f"avg@{self.k} {self.avg_at_k:.3f}, pass@{self.k} {self.pass_at_k:.3f}"
        line = f"held-out: {sampled}, greedy {self.greedy:.3f}"
        if abs(self.reward - self.avg_at_k) > 5e-4:
            line += f"; mean reward {self.reward:.3f} (right: at least {self.right_at:g})"
        return line

    def metrics(self) -> dict[str, float]:
        """By their public names."""
        out = {
            "eval/heldout/avg_at_k": self.avg_at_k,
            "eval/heldout/pass_at_k": self.pass_at_k,
            "eval/heldout/greedy": self.greedy,
            "eval/heldout/reward": self.reward,
            "eval/heldout/extracted_frac": self.extracted,
            **{f"eval/heldout/{kind}_frac": share for kind, share in self.kinds.items()},
        }
        return {**out, **{f"eval/{label}/avg_at_k": v[1] for label, v in self.labels.items()}}


def answers(
    engine: Engine,
    params: Any,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    scorer: AnyScorer,
    *,
    samples: int,
    sampler: Sampler,
    seed: int,
    purpose: Purpose = Purpose.EVAL,
) -> tuple[list[list[Rollout]], list[list[Score]]]:
    """`samples` scored rollouts of every prompt, in order. Draws depend on (seed, purpose, prompt,
    sample, position) alone.
    """
    turns = turns_of(tokenizer, engine.config)
    rollouts: dict[int, Rollout] = {}
    scores: dict[int, Score] = {}
    asked, begun = None, list[Rollout]()
    while asked is None or begun:
        options: dict[str, Any] = {"asked": asked, "carried": begun, "keep_routes": False}
        waiting: set[int] = set()
        for rollout in Collection(
            engine, params, prompts, samples, purpose, seed, sampler=sampler, **options
        ):
            rollouts[rollout.row] = rollout
            waiting.add(rollout.row)
            scorer.submit(rollout.row, rollout.prompt, partial(turns.text, rollout))
        begun = []
        while waiting:
            for row, score in scorer.collect(block=True):
                waiting.discard(row)
                rollouts[row], verdict = turns.settled(rollouts[row], score)
                if verdict is None:
                    begun.append(rollouts[row])
                else:
                    scores[row] = verdict
        asked = frozenset(rollout.key for rollout in begun)
    rows = [range(n * samples, (n + 1) * samples) for n in range(len(prompts))]
    return [[rollouts[r] for r in row] for row in rows], [[scores[r] for r in row] for row in rows]


def turns_of(tokenizer: Tokenizer, config: RolloutConfig) -> Turns:
    """How conversations cross between the texts of environments and a tokenizer's tokens."""
    return Turns(tokenizer.decode, turn_encoder(tokenizer), config.max_new_tokens)


def evaluation_uses(config: RunConfig) -> tuple[Use, Use]:
    """What an evaluation wants of the engine: k samples of each prompt, then one greedy answer."""
    e, goes_on = config.evaluation, config.rollout.cache_pages > 0 or talks(config.data)
    sampler = Sampler(e.temperature, e.top_k, e.top_p)
    return (
        Use("evaluation", e.k, (sampler,), goes_on=goes_on),
        Use("evaluation", 1, (Sampler(0.0),), goes_on=goes_on),
    )


def evaluate(
    engine: Engine,
    params: Any,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    scorer: AnyScorer,
    config: RunConfig,
    keep: Callable[[list[Group]], None] | None = None,
) -> Evaluation:
    """k samples at `evaluation.temperature` and one greedy answer for every prompt; right means
    reward >= rewards.right_at. `keep` gets a group for each prompt, its greedy answer the last.
    """
    at = config.rewards.right_at
    ask = partial(answers, engine, params, prompts, tokenizer, scorer, seed=config.seed)
    (rollouts, sampled), (best_rollouts, greedy) = (
        ask(samples=use.samples, sampler=use.samplers[0]) for use in evaluation_uses(config)
    )
    if keep is not None:
        pairs = zip(prompts, rollouts, best_rollouts, sampled, greedy, strict=True)
        keep([Group(p, (*r, *one), (*s, *verdict)) for p, r, one, s, verdict in pairs])
    right = np.array([[s.reward >= at and s.known for s in row] for row in sampled])
    known = np.array([[s.known for s in row] for row in sampled])
    best = np.array([row[0].reward >= at and row[0].known for row in greedy])
    best_known = np.array([row[0].known for row in greedy])
    names = [{p.label, *p.labels} for p in prompts]

    def mean(values, counted) -> float:
        return float(values[counted].mean()) if counted.any() else 0.0

    labels = {}
    for label in _labels(prompts):
        here = np.array([label in mine for mine in names])
        labels[label] = (
            int(here.sum()),
            mean(right[here], known[here]),
            mean(best[here], best_known[here]),
        )
    unknown = int((~known).sum() + (~best_known).sum())
    return Evaluation(
        config.evaluation.k,
        len(prompts),
        mean(right, known),
        mean(right.any(1), known.any(1)),
        mean(best, best_known),
        unknown,
        labels,
        extracted_frac([score for row in sampled for score in row]),
        group_shares(sampled, config.rewards),
        _warning(prompts, rollouts, sampled, tokenizer, config),
        mean(np.array([[score.reward for score in row] for row in sampled]), known),
        at,
    )


def _warning(
    prompts: Sequence[Prompt],
    rollouts: Sequence[Sequence[Rollout]],
    scores: Sequence[Sequence[Score]],
    tokenizer: Tokenizer,
    config: RunConfig,
) -> str:
    """What is said of an evaluation whose rewards say nothing; empty for another."""
    flat = [score for row in scores for score in row]
    kind = silence(flat, config.rewards)
    if not kind:
        return ""
    groups = [
        Group(prompt, tuple(mine), tuple(verdicts))
        for prompt, mine, verdicts in zip(prompts, rollouts, scores, strict=True)
    ]
    sample = sample_of(groups, tokenizer.decode)
    return silence_warning(kind, "of the evaluation", sample, len(flat), config)


def _labels(prompts: Sequence[Prompt]) -> list[str]:
    """The labels of the sources in their order; then those of the rows, "domain/algebra", unless
    a kind of them has more than MOST_VALUES values: a table of hundreds of lines says nothing.
    """
    own = sorted({label for p in prompts for label in p.labels})
    values = Counter(label.split("/", 1)[0] for label in own)
    few = [label for label in own if values[label.split("/", 1)[0]] <= MOST_VALUES]
    return list(dict.fromkeys([*(p.label for p in prompts), *few]))


def decoder_of(config: RunConfig, weights: str) -> tuple[Engine, Any, Tokenizer]:
    """Engine, decoding parameters and tokenizer for the weights of a run directory, a checkpoint or
    a Hugging Face folder.
    """
    tokenizer = load_tokenizer(config)
    placement = placements(config.rollout_mesh or config.mesh, None, False)[1]
    shardings = (
        None
        if placement is None
        else shardings_like(abstract_params(config.model, "float32"), config.model, placement)
    )
    params = init_or_load(
        dataclasses.replace(config, init_from=weights), jax.random.key(config.seed), shardings
    )
    engine = Engine(
        config.model,
        config.rollout_compute,
        config.rollout,
        tokenizer.eos_id,
        placement,
        tokenizer.vocab_size,
    )
    decode, _ = sync_weights(
        params,
        config.model,
        config.rollout_compute.dtype,
        config.rollout.quantize,
        placement=placement,
        layout=engine.layout,
    )
    return engine, decode, tokenizer


def evaluate_weights(config: RunConfig, weights: str, out: str | None = None) -> Evaluation:
    """Held-out accuracy of the weights of a run directory, a checkpoint or a Hugging Face
    folder.

    out: a folder for answers.jsonl, a row for each prompt as in rollouts.jsonl, the greedy answer
    the last of its samples, and summary.json; None: nothing is written.
    """
    config.validate()
    if not config.data.eval_prompts:
        raise ConfigError("data.eval_prompts = 0: there are no held-out prompts to evaluate on")
    engine, decode, tokenizer = decoder_of(config, weights)
    console = Console(soft_wrap=True, quiet=not is_main_process())
    tell = partial(console.print, highlight=False, markup=False)
    prompts = heldout_prompts(config.data, tokenizer, config.seed, tell)
    prompts = fitting(prompts, config.rollout.prompt_buckets[-1], config.data.overlong, tell)
    kept: list[Group] = []
    with open_scorer(config) as scorer:
        found = evaluate(engine, decode, prompts, tokenizer, scorer, config, kept.extend)
    if out and is_main_process():
        with FolderLock(out) as lock:
            rows = sample_rows(kept, tokenizer.decode)
            text = "".join(json.dumps({"step": 0, "stage": "eval", **row}) + "\n" for row in rows)
            write_atomically(lock.path / ANSWERS, text)
            summary = {"weights": weights, **dataclasses.asdict(found)}
            write_atomically(lock.path / "summary.json", json.dumps(summary, indent=2) + "\n")
        tell(f"{len(rows)} prompts with their answers: {out}/{ANSWERS}; accuracies: summary.json")
    if found.warning:
        tell(found.warning)
    return found


def run_eval(config: RunConfig, checkpoint: str, out: str | None = None) -> dict[str, Any]:
    """`compass eval`: prints the accuracies by label and returns them as a dict; `out` as in
    `evaluate_weights`.
    """
    found = evaluate_weights(config, checkpoint, out)
    rows = [
        {"task": name, "prompts": n, f"avg@{found.k}": avg, "greedy": best}
        for name, (n, avg, best) in found.labels.items()
    ]
    rows.append(
        {
            "task": "all",
            "prompts": found.prompts,
            f"avg@{found.k}": found.avg_at_k,
            "greedy": found.greedy,
        }
    )
    console = Console(soft_wrap=True, quiet=not is_main_process())
    console.print(notice(config.rewards.sandbox), highlight=False)
    console.print(summary_table(rows, title=f"{checkpoint}: accuracy on held-out prompts"))
    console.print(
        f"pass@{found.k} {found.pass_at_k:.4g}; an answer was found in {found.extracted:.1%} of the"
        f" responses; scores left out because the check failed: {found.unknown}"
    )
    return dataclasses.asdict(found)
