"""Gold labels: they come from the workers and another column, in addition to the reward, and never
replace it."""

import dataclasses

import numpy as np
import pytest

from compass_jax.base.records import Prompt, Score
from compass_jax.config import ConfigError, DataConfig, FileSource, ProceduralSource, RewardConfig
from compass_jax.rewards.joined import JoinedScorer, is_audited
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.rows import encode_row

DATA = DataConfig(
    sources=(
        FileSource("a.jsonl", verifier="exact", gold="exact"),
        FileSource("b.jsonl", verifier="exact"),
        FileSource("c.jsonl", verifier="exact", gold={"exact": 0.5, "corpus_verifiers:act": 1.0}),
    )
)


def prompt(source, **row):
    return Prompt(1, source, "x", "q", np.zeros(1, np.int32), "", encode_row(row))


def answered(n):
    return f"<answer>{n}</answer>"


def test_the_reward_is_of_the_reference_and_gold_of_the_column_gold():
    submissions = {
        "both": (prompt(0, answer="4", gold="4"), answered(4)),
        "reward": (prompt(0, answer="4", gold="5"), lambda: answered(4)),
        "gold": (prompt(0, answer="4", gold="5"), answered(5)),
        "no column": (prompt(0, answer="4"), answered(4)),
        "no label": (prompt(1, answer="4", gold="5"), answered(4)),
        "label fails": (prompt(2, answer="4"), answered(4)),
    }
    scores = {}
    with JoinedScorer(Scorer(RewardConfig(), DATA), DATA) as scorer:
        for key, (question, response) in submissions.items():
            scorer.submit(key, question, response)
        assert scorer.outstanding == 6
        while scorer.outstanding:
            scores |= dict(scorer.collect(block=True))
        assert scorer.collect(block=True) == []
    labels = {key: (score.reward, score.components.get("gold")) for key, score in scores.items()}
    assert all(score.known for score in scores.values())
    assert labels == {
        "both": (1, 1),
        "reward": (1, 0),
        "gold": (0, 1),
        "no column": (1, 1),
        "no label": (1, None),
        "label fails": (1, None),
    }


def test_a_share_of_the_groups_has_gold_labels_always_the_same():
    groups = [(n, visit) for n in range(300) for visit in range(2)]
    prompts = {
        key: dataclasses.replace(prompt(0, answer="4"), id=key[0], visit=key[1]) for key in groups
    }
    audited = {key for key, question in prompts.items() if is_audited(question, 0.3)}
    assert 0.2 < len(audited) / len(groups) < 0.4
    assert audited < {key for key, question in prompts.items() if is_audited(question, 0.5)}
    assert all(is_audited(question, 1.0) for question in prompts.values())
    assert {visit for n, visit in audited} == {0, 1} and (0, 0) in groups
    some = groups[:8]
    with JoinedScorer(Scorer(RewardConfig(), DATA), DATA, gold_share=0.3) as scorer:
        for key in some:
            scorer.submit(key, prompts[key], answered(4))
        scores = {}
        while scorer.outstanding:
            scores |= dict(scorer.collect(block=True))
    assert {key for key in some if "gold" in scores[key].components} == audited & set(some) != set()
    assert all(score == Score(1.0, True, components=score.components) for score in scores.values())


class Late:
    """A scorer that returns one part at a time, rewards last."""

    def __init__(self):
        self.held = []

    def submit(self, key, prompt, response):
        self.held.append((key, Score(1.0, True, components={"gold": 7.0, "other": 2.0})))

    def collect(self, block):
        return [self.held.pop()] if self.held else []


def test_a_sample_is_collected_once_with_its_last_part_and_other_components_stay():
    scorer = JoinedScorer(Late(), DATA)
    scorer.submit("a", prompt(0, answer="4"), "x")
    assert scorer.collect(block=False) == []
    assert scorer.collect(block=True) == [
        ("a", Score(1.0, True, components={"other": 2.0, "gold": 1.0}))
    ]
    scorer.submit("b", prompt(1, answer="4"), "x")
    assert scorer.collect(block=True)[0][1].components == {"gold": 7.0, "other": 2.0}
    assert scorer.outstanding == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (FileSource("a.jsonl", gold="maths"), "gold = 'maths': did you mean 'math'?"),
        (FileSource("a.jsonl", gold={"math": 0.0}), "gold: 'math' has weight 0"),
        (FileSource("a.jsonl", gold="reasoning_gym"), "gold = 'reasoning_gym'"),
    ],
)
def test_a_label_that_names_no_verifier_is_refused(source, message):
    with pytest.raises(ConfigError, match="gold") as error:
        DataConfig(sources=(source,)).validate()
    assert message in str(error.value)
    DataConfig(sources=(ProceduralSource("leg_counting", gold="reasoning_gym"),)).validate()
