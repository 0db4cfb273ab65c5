"""Sources with several verifiers, with batch and async verifiers, and with registered data sets, in
real workers; and invalid rewards, which are refused before a run starts."""

import dataclasses
import textwrap

import numpy as np
import pytest
from test_score import drain
from tiny_run import tiny_run

from compass_jax.base.errors import UserError
from compass_jax.base.records import Prompt, Score
from compass_jax.config import (
    ConfigError,
    DataConfig,
    FileSource,
    ProceduralSource,
    RewardConfig,
    ShapingConfig,
    TaskSource,
)
from compass_jax.config.io import config_from_json, config_to_json
from compass_jax.config.verifiers import spread
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.rows import encode_row

OWN = '''
import asyncio, os, time


def batch(prompts, responses, answer, most):
    """Sees others, fails as a whole where one of them is bad, and says how many it had."""
    if "hang" in responses:
        time.sleep(60)
    if "die" in responses:
        os._exit(3)
    if "none" in responses:
        return [None if one == "none" else 1.0 for one in responses]
    same = [float(one == want) for one, want in zip(responses, answer, strict=True)]
    return [{"reward": x, "together": len(responses), "most": most} for x in same]


async def slow(response, answer):
    await asyncio.sleep(0.01)
    return {"reward": float(response == answer), "extracted": bool(response)}
'''


def prompt(source=0, **row):
    return Prompt(1, source, "x", "what?", np.zeros(1, np.int32), "", encode_row(row))


def scored(source, texts, timeout_s=20.0, **row):
    data = DataConfig(sources=(source,))
    with Scorer(RewardConfig(timeout_s=timeout_s), data) as scorer:
        for text in texts:
            scorer.submit(text, prompt(**row), text)
        return drain(scorer)


def source_of(tmp_path, name, text=OWN, **more):
    (tmp_path / "mine.py").write_text(textwrap.dedent(text))
    return FileSource("rows.jsonl", verifier=f"{tmp_path}/mine.py:{name}", **more)


def test_weights_add_up_and_every_part_is_a_component(tmp_path):
    source = FileSource("rows.jsonl", verifier={"math": 0.7, "format": 0.2, "length": 0.1})
    texts = ["<think>3+4</think><answer>7</answer>", r"\boxed{7}", "<think>a</think>no", "x" * 99]
    got = scored(source, texts, answer="7", most_chars=60)
    parts = [(s.reward, s.extracted, *s.components.values()) for s in (got[t] for t in texts)]
    assert parts == [
        (1.0, True, 1.0, 1.0, 1.0),  # 0.7 + 0.2 + 0.1, without the rounding of floats
        (0.8, True, 1.0, 0.0, 1.0),
        (0.1, False, 0.0, 0.0, 1.0),
        (0.0, False, 0.0, 0.0, 0.0),
    ]
    assert list(got[texts[0]].components) == ["math", "format", "length_reward"]


def test_usual_ones_beside_ones_own_and_where_one_judges_nothing_nobody_does(tmp_path):
    source = source_of(tmp_path, "slow")
    source = dataclasses.replace(source, verifier={source.verifier: -0.5, "exact": 1.0})
    got = scored(source, ["7", "<answer>7</answer>", ""], answer="7")
    assert got["7"] == Score(-0.5, True, "ok", "", {"slow": 1.0, "exact": 0.0}, False)
    assert got["<answer>7</answer>"] == Score(1.0, True, components={"slow": 0.0, "exact": 1.0})
    assert not got[""].extracted and got[""].known
    silent_source = source_of(tmp_path, "f", "def f(response): return None if response else 1")
    silent_source = dataclasses.replace(
        silent_source, verifier={silent_source.verifier: 0.5, "exact": 1.0}
    )
    assert scored(silent_source, ["7"], answer="7")["7"] == Score(
        0.0, False, "unjudged", extracted=False
    )


def test_a_batch_is_judged_in_one_call_and_one_that_hangs_or_dies_costs_itself_alone(tmp_path):
    source = source_of(tmp_path, "batch", verifier_args={"most": 3})
    got = scored(source, [str(n) for n in range(40)], answer="7")
    assert [n for n in range(40) if got[str(n)].reward] == [7]
    assert max(score.components["together"] for score in got.values()) > 4
    assert {score.components["most"] for score in got.values()} == {3.0}
    texts = ["7", "hang", "8", "die", "none", "9"]
    got = scored(source, texts, timeout_s=1.0, answer="7")
    assert [got[t].outcome for t in texts] == ["ok", "timeout", "ok", "crash", "unjudged", "ok"]
    assert [got[t].reward for t in ("7", "8", "9")] == [1.0, 0.0, 0.0]


def test_an_argument_that_nobody_takes_is_refused(tmp_path):
    source = source_of(tmp_path, "slow", verifier_args={"mots": 1})
    with pytest.raises(UserError, match=r"sources\[0\].verifier_args: no verifier takes 'mots'"):
        scored(source, ["7"], answer="7")


REGISTERED = """
import dataclasses
from reasoning_gym.factory import ProceduralDataset, register_dataset


@dataclasses.dataclass
class Config:
    seed: int = 0
    size: int = 10
    shout: bool = False

    def validate(self):
        pass


class Echoes(ProceduralDataset):
    def __init__(self, config):
        super().__init__(config, config.seed, config.size)

    def __getitem__(self, index):
        word = f"w{self.seed + index}"
        answer = word.upper() if self.config.shout else word
        return {"question": f"Say {word}", "answer": answer, "metadata": {}}

    def score_answer(self, answer, entry):
        return float(eval(repr(answer)) == entry["answer"])


register_dataset("echoes_of_a_test", Echoes, Config)
"""


def test_a_data_set_that_a_persons_module_registered_is_scored_in_workers(tmp_path, monkeypatch):
    """Only this test imports the module, and no setting names it; the options reach the workers'
    copy.
    """
    (tmp_path / "my_echoes.py").write_text(REGISTERED)
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_echoes  # noqa: F401
    from reasoning_gym.factory import DATASETS

    try:
        source = ProceduralSource("echoes_of_a_test", {"shout": True}, size=5)
        row = {"question": "Say w1", "answer": "W1", "metadata": {}}
        got = scored(source, ["<answer>W1</answer>", "<answer>w1</answer>", "W1"], **row)
        assert [(s.reward, s.known, s.extracted) for s in got.values()] == [
            (1.0, True, True),
            (0.0, True, True),
            (0.0, True, False),
        ]
        # A module that runs as a program cannot be imported by workers.
        DATASETS["echoes_of_a_test"][0].__module__ = "__main__"
        with pytest.raises(ConfigError, match="registered by __main__, which"):
            scored(source, ["x"])
    finally:
        DATASETS.pop("echoes_of_a_test")


def test_rewards_that_cannot_be_right_or_are_too_close_for_shaping_are_refused():
    base = tiny_run()

    def config(verifier, shaping=0.0, **rewards):
        source = FileSource("rows.jsonl", verifier=verifier)
        shaped = ShapingConfig(length_penalty=shaping)
        rl = dataclasses.replace(base.rl, shaping=shaped)
        data = DataConfig(sources=(source,), tokenizer=base.data.tokenizer)
        return dataclasses.replace(base, data=data, rl=rl, rewards=RewardConfig(**rewards))

    config({"math": 1.0, "format": 0.2}).validate_for_rl()
    config({"math": 0.7, "format": 0.2, "choice": 0.1}).validate_for_rl()
    config({"math": 1.0, "format": 0.2}, 0.1, smallest_gap=0.2).validate_for_rl()
    with pytest.raises(ConfigError, match=r"gives at most 0.9, and rewards.right_at = 1: no"):
        config({"math": 0.7, "format": 0.2}).validate_for_rl()
    with pytest.raises(
        ConfigError, match=r"0.2 apart.*leave rewards.smallest_gap out, or set it to 0.2"
    ):
        config({"math": 1.0, "format": 0.2}, 0.1, smallest_gap=1.0).validate_for_rl()
    config({"math": 1.0, "format": 0.2}, 0.1).validate_for_rl()
    with pytest.raises(ConfigError, match=r"sum to 0.2, which is not below 0.2.*data.sources\[0\]"):
        config({"math": 1.0, "format": 0.2}, 0.2).validate_for_rl()


def test_a_weighted_source_survives_json_and_is_written_on_the_command_line():
    from worded import override

    base = tiny_run()
    source = FileSource("a.jsonl", verifier={"math": 1.0, "x.py:f": 0.2}, verifier_args={"n": 3})
    config = dataclasses.replace(base, data=dataclasses.replace(base.data, sources=(source,)))
    assert config_from_json(config_to_json(config)) == config
    words = ["--data.sources.0.verifier", "exact", "1", "format", "0.5"]
    overridden = override(config, [*words, "--data.sources.0.verifier-args", '[["n", 4]]'])
    assert overridden.data.sources[0].verifier == (("exact", 1.0), ("format", 0.5))
    assert overridden.data.sources[0].verifier_args == (("n", 4),)


def test_nobody_says_before_a_run_what_a_task_may_give():
    base = tiny_run()
    task = dataclasses.replace(base.data, sources=(TaskSource("my_tasks:task"),))
    assert spread(task.sources[0]) is None
    dataclasses.replace(base, data=task).validate_for_rl()
