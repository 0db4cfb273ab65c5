"""The evaluations of an RL run: before its first step, between steps and at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import Group
from compass_jax.config.data import HELDOUT
from compass_jax.data.prompts import PromptSet
from compass_jax.devices.distributed import is_main_process
from compass_jax.experience.accuracy import Evaluation
from compass_jax.experience.evaluate import count_answers, evaluate, evenly, start_sets
from compass_jax.experience.evaluated import answer_rows, summary_of, write_evaluation
from compass_jax.runs.rundir import (
    EVALUATION,
    EVALUATION_FOLDER,
    EVALUATION_START,
    write_atomically,
)
from compass_jax.runs.screen import EVALUATION_PHASE
from compass_jax.runs.telemetry import plain_numbers
from compass_jax.training.hooks.base import Hook
from compass_jax.training.hooks.notices import Notices
from compass_jax.training.loop import RLTrainer


@dataclass(frozen=True)
class Evaluated:
    """An evaluation of the weights after `step` steps, or of their average. complete: of all
    prompts. average: the metrics of the average's sync.
    """

    step: int
    result: Evaluation
    rows: list[JsonObject]
    complete: bool
    average: Mapping[str, float]

    def rewards(self) -> dict[str, float]:
        """Returns the mean reward of the sampled answers to each held-out prompt, by its id."""
        known = {
            str(row["id"]): [x["reward"] for x in row["samples"][:-1] if x["outcome"] == "ok"]
            for row in self.rows
            if row["set"] == HELDOUT
        }
        return {key: sum(values) / len(values) for key, values in known.items() if values}


class Evaluations:
    """Evaluates the policy of a run's stage on its held-out prompts and `data.eval_sets`. Where
    there are none, its methods do nothing.
    """

    def __init__(self, trainer: RLTrainer):
        self._trainer, self._telemetry = trainer, trainer.telemetry
        self._sets, self._config = trainer.parts.prompts.evaluated, trainer.config
        self._latest: Evaluated | None = None

    def at_start(self) -> None:
        """Evaluates the weights before the first step on as many prompts as have the answers of a
        step (evaluation.start). The first rollout warns of uninformative rewards.
        """
        done = self._trainer.done_steps
        if not self._sets or not self._config.evaluation.start or done:
            return
        rl, most = self._config.rl, self._config.evaluation.start_prompts
        chosen = start_sets(self._sets, most, rl.prompts_per_step * rl.group_size)
        evaluated = self._evaluate(chosen, warns=False)
        self._telemetry.note(f"before the first step, {evaluated.result.line()}")
        if line := start_in_words(self._sets, evaluated.result):
            self._telemetry.note(line)
        else:
            self._trainer.hooks.call(Hook.on_evaluation, 0, evaluated.rewards())
        self._keep(evaluated, EVALUATION_START)

    def between(self, step: int) -> dict[str, float]:
        """Evaluates after a step at which an evaluation is due (rl.eval_every, evaluation.at);
        returns its metrics.
        """
        every = self._config.rl.eval_every
        due = step in self._config.evaluation.at or (every and step % every == 0)
        if not self._sets or not due:
            return {}
        most = self._config.evaluation.prompts
        evaluated = self._evaluate([evenly(x, most or len(x.prompts)) for x in self._sets])
        self._telemetry.note(f"step {step}, {evaluated.result.line()}")
        self._trainer.hooks.call(Hook.on_evaluation, step, evaluated.rewards())
        return {**evaluated.result.metrics(), **evaluated.average}

    def forget(self) -> None:
        """Forgets the latest evaluation, whose policy was replaced."""
        self._latest = None

    def last(self) -> Evaluation | None:
        """Evaluates the trained policy by the settings of the last stage, unless the latest
        evaluation is of these weights and all prompts. The run directory keeps its metrics, and its
        answers for `compass show` and `compass compare`.
        """
        if not self._sets:
            return None
        done, latest = self._trainer.done_steps, self._latest
        if latest is None or not latest.complete or latest.step != done:
            latest = self._evaluate(self._sets)
            self._telemetry.note(latest.result.line())
        self._keep(latest, EVALUATION_FOLDER)
        if is_main_process():
            summary = {"step": done, "metrics": plain_numbers(latest.result.metrics())}
            file = Path(self._config.directory) / EVALUATION
            write_atomically(file, json.dumps(summary, indent=2) + "\n")
        return latest.result

    def _evaluate(self, sets: Sequence[PromptSet], warns: bool = True) -> Evaluated:
        """Evaluates the policy, or the average of the weights, on `sets`. warns: of uninformative
        rewards, which may end the run.
        """
        trainer, rows = self._trainer, list[JsonObject]()

        def keep(set_name: str, groups: list[Group]) -> None:
            rows.extend(answer_rows(set_name, groups, trainer.collect.turns.response))

        # With rl.one_step_off a thread may still be sampling on the engine.
        trainer.await_rollout()
        weights = trainer.parts.weights
        with weights.averaged(trainer.learner) as average:
            result = evaluate(
                engine=trainer.collect.engine,
                params=weights.params,
                sets=sets,
                tokenizer=trainer.parts.tokenizer,
                scorer=trainer.collect.scorer,
                config=self._config.scored,
                keep=keep,
                progress=partial(self._telemetry.phase, EVALUATION_PHASE),
                collection=trainer.parts.collection,
            )
        if result.warning and warns:
            trainer.hooks.find(Notices).warn(result.warning)
        complete = count_answers(sets) == count_answers(self._sets)
        self._latest = Evaluated(trainer.done_steps, result, rows, complete, average)
        return self._latest

    def _keep(self, evaluated: Evaluated, name: str) -> None:
        """Writes answers and summary into the folder `name` of the run."""
        if is_main_process():
            folder = Path(self._config.directory) / name
            folder.mkdir(exist_ok=True)
            weights = f"{self._config.directory}, step {evaluated.step}"
            summary = summary_of(evaluated.result, self._config.scored, weights)
            write_evaluation(folder, summary, evaluated.rows)


def start_in_words(sets: Sequence[PromptSet], result: Evaluation) -> str:
    """Returns a line on the sets of which the evaluation before the first step had a part; empty
    where it had all.
    """
    parts = [
        f"{result.sets[one.name].prompts} of {len(one.prompts):,} prompts of {one.name}"
        f" (standard error {result.sets[one.name].avg_at_k_se:.3f})"
        for one in sets
        if result.sets[one.name].prompts < len(one.prompts)
    ]
    if not parts:
        return ""
    return (
        f"  that is {', '.join(parts)}, so that training begins soon; the last evaluation has"
        " all of them; evaluation.start_prompts sets the number"
    )
