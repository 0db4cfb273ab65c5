"""The last evaluation of a run: it is not repeated if the last step evaluated the same weights on
all prompts.
"""

import dataclasses
from types import SimpleNamespace

import pytest
from tiny_run import tiny_run

from compass_jax.data.prompts import PromptSet
from compass_jax.runs.rundir import EVALUATION, EVALUATION_FOLDER
from compass_jax.training import rl
from compass_jax.training.stops import never_stop


class Trainer:
    """A trainer of two steps that records its evaluations; its other parts do nothing."""

    evaluated = (PromptSet("heldout", ["a", "b", "c"], 1, 1.0),)
    interrupted, histograms = False, None
    stage = SimpleNamespace(end=2)
    collect = SimpleNamespace(turns=SimpleNamespace(response=str))
    guard = SimpleNamespace(
        parted=0,
        ended=False,
        refuse_parted=lambda directory: None,
        of_evaluation=lambda step, rewards: None,
    )

    def __init__(self, config):
        self.config, self.done_steps, self.evaluations = config, 0, []

    def steps(self):
        for self.done_steps in (1, 2):
            yield self.done_steps, {"loss": 1.0}

    def evaluate(self, sets, keep, warns=True):
        self.evaluations.append((self.done_steps, "".join(sets[0].prompts)))
        return SimpleNamespace(line=lambda: "avg@4 50%", metrics=lambda: {"eval/x": 0.5}, sets={})

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
    monkeypatch.setattr(rl, "write_evaluation", lambda *_: None)
    monkeypatch.setattr(rl, "_start_in_words", lambda sets, result: "")
    config = tiny_run()
    steps = dataclasses.replace(config.rl, steps=2, eval_every=every)
    start = dataclasses.replace(config.evaluation, start=True, prompts=prompts)
    config = dataclasses.replace(config, run_dir=str(tmp_path), rl=steps, evaluation=start)
    trainer, lines = Trainer(config), []
    telemetry = SimpleNamespace(note=lines.append, log=lambda *_: None)
    stop = SimpleNamespace(requested=False)
    steps = rl._run_steps(trainer, trainer.steps(), telemetry, stop, never_stop)
    with pytest.raises(StopIteration) as end:
        while True:
            next(steps)
    result = end.value.value
    assert trainer.evaluations == expected and result["evaluation"].metrics() == {"eval/x": 0.5}
    assert sum("avg@4" in line for line in lines) == len(expected)
    assert (tmp_path / EVALUATION).is_file() and (tmp_path / EVALUATION_FOLDER).is_dir()
