"""The last evaluation of a run: it is not repeated if the last step evaluated the same weights on
all prompts.
"""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from tiny_run import tiny_run

from compass_jax.data.prompts import PromptSet
from compass_jax.runs.rundir import EVALUATION, EVALUATION_FOLDER
from compass_jax.training import evaluations, rl
from compass_jax.training.hooks.base import Hooks, StepRecord
from compass_jax.training.hooks.guard import Guard
from compass_jax.training.session import RunState
from compass_jax.training.stops import never_stop


class Trainer:
    """A trainer of two steps that records its evaluations; its other parts do nothing."""

    interrupted, stage = False, SimpleNamespace(end=2)
    collect = SimpleNamespace(turns=SimpleNamespace(response=str), engine=None, scorer=None)

    def __init__(self, config, note):
        self.config, self.rl, self.done_steps, self.evaluations = config, config.rl, 0, []
        self.telemetry = SimpleNamespace(
            note=note, log=lambda *_: None, phase=lambda *_: None, writes=False
        )
        self.run_state = RunState()
        self.hooks = Hooks([Guard(config.rl.guard, 2, config.rewards, lambda *_: None)])
        sets = [PromptSet("heldout", ["a", "b", "c"], 1, 1.0)]
        self.parts = SimpleNamespace(
            prompts=SimpleNamespace(evaluated=sets),
            tokenizer=None,
            collection=None,
            weights=SimpleNamespace(params=None, averaged=lambda learner: nullcontext({})),
        )
        self.learner = None

    def steps(self):
        for self.done_steps in (1, 2):
            yield StepRecord(self.done_steps, [], None, metrics={"loss": 1.0})

    def evaluate(self, *, sets, **_):
        self.evaluations.append((self.done_steps, "".join(sets[0].prompts)))
        return SimpleNamespace(
            line=lambda: "avg@4 50%", metrics=lambda: {"eval/x": 0.5}, sets={}, warning=""
        )

    def await_rollout(self):
        pass

    def save(self, *, wait=True):
        pass


@pytest.mark.parametrize(
    ("every", "prompts", "expected"),
    [
        (2, None, [(0, "abc"), (2, "abc")]),
        (1, None, [(0, "abc"), (1, "abc"), (2, "abc")]),
        (0, None, [(0, "abc"), (2, "abc")]),
        (1, 2, [(0, "abc"), (1, "ab"), (2, "ab"), (2, "abc")]),
        (0, 2, [(0, "abc"), (2, "abc")]),
        (1, 4, [(0, "abc"), (1, "abc"), (2, "abc")]),
    ],
)
def test_each_weights_are_evaluated_once(tmp_path, monkeypatch, every, prompts, expected):
    config = tiny_run()
    steps = dataclasses.replace(config.rl, steps=2, eval_every=every)
    start = dataclasses.replace(config.evaluation, start=True, prompts=prompts)
    config = dataclasses.replace(config, run_dir=str(tmp_path), rl=steps, evaluation=start)
    lines: list[str] = []
    trainer = Trainer(config, lines.append)
    monkeypatch.setattr(evaluations, "evaluate", trainer.evaluate)
    for name in ("summary_of", "write_evaluation"):
        monkeypatch.setattr(evaluations, name, lambda *_: None)
    monkeypatch.setattr(evaluations, "start_in_words", lambda sets, result: "")
    steps = rl._run_steps(trainer, trainer.steps(), never_stop)
    with pytest.raises(StopIteration) as end:
        while True:
            next(steps)
    result = end.value.value
    assert trainer.evaluations == expected and result["evaluation"].metrics() == {"eval/x": 0.5}
    assert sum("avg@4" in line for line in lines) == len(expected)
    assert (tmp_path / EVALUATION).is_file() and (tmp_path / EVALUATION_FOLDER).is_dir()
