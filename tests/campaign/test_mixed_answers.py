"""Hostile answers and verifiers in random order among honest ones, in the scorer that a run uses:
no honest score changes, and nothing of a hostile answer outlives its check.
"""

import os

import numpy as np
import pytest
from corpus import ANSWERS, DATASETS, VERIFIERS

from compass_jax.base.records import Prompt
from compass_jax.config import DataConfig, FileSource, ProceduralSource, RewardConfig
from compass_jax.data.procedural import distinct_entries
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.rows import encode_row

VERIFIER, HOSTILE_PER_FAULT = len(DATASETS), 5
# (data set or "verifier", the hostile text, its score or its outcome)
HOSTILE = [(kind, text, 0.0) for kind, text, _ in ANSWERS.values() if kind in DATASETS]
HOSTILE += [("verifier", text, expected) for text, expected in VERIFIERS.values()]


@pytest.fixture(scope="module")
def entries():
    """The first entry of each data set, and a row for the hostile verifiers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        rows = [distinct_entries(ProceduralSource(name, size=1), 0)[0] for name in DATASETS]
        yield [*rows, {"answer": "1"}]


@pytest.fixture(scope="module")
def scorer(entries):
    judged = FileSource("unused.jsonl", verifier="corpus_verifiers:act")
    sources = (*(ProceduralSource(name, size=1) for name in DATASETS), judged)
    rewards = RewardConfig(workers=2, timeout_s=1.5, answer_tag="")
    with Scorer(rewards, DataConfig(sources=sources)) as running:
        running.wait_ready()
        yield running


def test_hostile_answers_change_no_honest_score(draw, scorer, entries, tmp_path):
    places = {"out": tmp_path, "secret": tmp_path / "none", "judge": __file__}
    places |= {"me": os.getpid(), "port": 9}
    submitted = []
    for kind, text, outcome in draw.sample(HOSTILE, HOSTILE_PER_FAULT):
        source = DATASETS.index(kind) if kind in DATASETS else VERIFIER
        right, wrong = str(entries[source]["answer"]), "0" if source == VERIFIER else "the moon"
        submitted += [(source, right, 1.0), (source, text.format(**places), outcome)]
        submitted += [(source, wrong, 0.0)]
    draw.shuffle(submitted)
    for number, (source, text, _) in enumerate(submitted):
        entry = entries[source]
        tokens = np.zeros(1, np.int32)
        prompt = Prompt(number, source, "x", "?", tokens, str(entry["answer"]), encode_row(entry))
        scorer.submit(number, prompt, text)
    scores = {}
    while len(scores) < len(submitted):
        scores |= dict(scorer.collect(block=True))
    for number, (_, text, expected) in enumerate(submitted):
        score = scores[number]
        if isinstance(expected, str):  # on a busy machine a fault may end as a timeout
            assert not score.known, text
        else:
            assert score.known and score.reward == expected, text
    assert not os.listdir(tmp_path)
