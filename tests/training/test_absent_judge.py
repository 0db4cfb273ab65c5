"""A run whose judge is unreachable: it saves its state and ends, and continues once the judge is
back.
"""

import json
import socket

import pytest
from evolve import evolve
from judged import quoted, served, settings
from logged import lines
from tiny_run import tiny_run

from compass_jax.config import FileSource, named_correction
from compass_jax.rewards.faults import VerifierError
from compass_jax.training.loop import StepFailed
from compass_jax.training.rl import run_rl

SEED = 1  # no response of its first step is empty; an empty one is Worse without a judge


def say(number, body):
    """Returns a verdict by which the longer answer is the better one."""
    texts = (quoted(body["messages"][1]["content"], x) for x in ("Candidate", "Anchor"))
    candidate, anchor = map(len, texts)
    return "Better" if candidate > anchor else "Worse" if candidate < anchor else "Tie"


def config(folder, name, endpoint, seed=0, **rl):
    file = folder / "rows.jsonl"
    rows = [{"prompt": f"{n}?", "answer": "seven"} for n in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = tiny_run()
    source = FileSource(str(file), verifier="judge")
    judge = settings(endpoint, requests=2, retries=0)
    return evolve(
        base,
        run_dir=str(folder / name),
        seed=seed,
        data={"sources": (source,), "heldout_frac": 0.0, "eval_prompts": 0},
        rewards={"judge": judge},
        rl={"save_every": 0, **rl},
    )


def closed_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


def answers(folder, name):
    return [
        (row["step"], row["prompt"], [(x["response"], x["reward"]) for x in row["samples"]])
        for row in lines(folder / name, "rollouts")
    ]


def test_the_same_command_goes_on_when_the_judge_is_back(tmp_path, caplog):
    absent = closed_address()
    with pytest.raises(VerifierError, match=r"unreachable.*the same command goes on then"):
        run_rl(config(tmp_path, "run", absent))
    assert "the judge gave no verdict (unreachable" in caplog.text
    with served(say) as (endpoint, _):
        result = run_rl(config(tmp_path, "run", endpoint))
        assert result["steps"] == 2 and not result["stopped"]
        run_rl(config(tmp_path, "undisturbed", endpoint))
    assert answers(tmp_path, "run") == answers(tmp_path, "undisturbed")
    rewards = {reward for *_, samples in answers(tmp_path, "run") for _, reward in samples}
    assert len(rewards) > 1 and None not in rewards


@pytest.mark.slow
def test_a_step_of_fewer_samples_ends_the_run_before_it_is_trained_on(tmp_path):
    """Four samples a step are fewer than the eight that end a run during a rollout."""
    small = {"one_step_off": True, "correction": named_correction("tis"), "prompts_per_step": 2}
    small |= {"group_size": 2, "steps": 3}
    with pytest.raises(StepFailed, match=r"all 4 samples of a step failed.*Connection refused"):
        run_rl(config(tmp_path, "run", closed_address(), SEED, **small))
    with served(say) as (endpoint, _):
        run_rl(config(tmp_path, "run", endpoint, SEED, **small))
    rows = lines(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["metrics"]["reward/unknown_frac"] for row in rows] == [0, 0, 0]
