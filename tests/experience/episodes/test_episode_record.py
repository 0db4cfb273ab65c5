"""How an episode went, in its verdict, in the metrics and in the log."""

import dataclasses

import numpy as np
import pytest
from test_sessions import END, reply, session

from compass_jax.base.records import GIVEN, Group, Prompt, Rollout, Score
from compass_jax.experience.episodes.record import episode_metrics, record_of, response_row


def text_of(rollout):
    """Returns a letter for each token of the response, and what the prompt opens."""
    opened = "<" if rollout.prompt.tokens[-1:].tolist() == [50] else ""
    return opened + "".join(chr(97 + x) for x in rollout.response)


def played():
    """Returns a session of two branches, of which the first one is trained."""
    one = session()
    history = reply(one, [5, 6], [7, 8])
    history = reply(one, [*history, 9], [4, 1])
    reply(one, [5, 6, 7], [3])
    branch = one.trained()
    seconds = [(0.25, 1.5), (0.125, 2.0)]
    branch.replies = [
        x._replace(environment_s=a, model_s=b)
        for x, (a, b) in zip(branch.replies, seconds, strict=True)
    ]
    return one


def test_a_record_has_the_trained_branch_and_what_the_others_cost():
    record = record_of(played(), "", 0.5, 4.0)
    assert record == {
        "turns": 3,
        "branches": 2,
        "dropped_tokens": 1,
        "branch": 0,
        "environment_s": 0.5,
        "model_s": 3.5,
        "replies": [[4, 0.25, 1.5], [7, 0.125, 2.0]],
    }
    assert record_of(session(), "", 0.5, 0.25)["replies"] == []  # without a reply


def test_the_parts_of_a_logged_sample_are_what_was_given_and_what_was_sampled_with_their_times():
    one = played()
    record = {"end": "turns", **record_of(one, "", 0.5, 4.0)}
    row = response_row(one.sample(END), Score(1.0, True, episode=record), text_of)
    assert row["response"] == "ghijeb"  # after the placeholder
    assert row["parts"] == [
        {"by": "environment", "chars": 1, "tokens": 1, "time_s": 0.25},
        {"by": "model", "chars": 2, "tokens": 2, "time_s": 1.5},
        {"by": "environment", "chars": 1, "tokens": 1, "time_s": 0.125},
        {"by": "model", "chars": 2, "tokens": 2, "time_s": 2.0},
    ]
    assert row["episode"] == {name: x for name, x in record.items() if name != "replies"}
    lost = response_row(session().sample(END), Score(0.0, False, "error", episode=record), text_of)
    assert lost["response"] == "" and lost["parts"] == []


def conversation(versions, last=2):
    tokens = np.arange(len(versions) + 1, dtype=np.int32)
    tokens[0] = last
    zeros = np.zeros(len(tokens), np.float32)
    prompt = dataclasses.replace(Prompt.of_tokens([last], 7), turns=2)
    return Rollout(prompt, 0, tokens, zeros, zeros, False, np.array([0, *versions], np.int32), 0)


def test_a_conversation_with_a_tasks_environment_has_its_parts_without_times():
    row = response_row(conversation([3, 3, GIVEN, 3], last=50), Score(1.0, True), text_of)
    assert row["response"] == "<bcde" and "episode" not in row
    assert [(x["by"], x["chars"], x["tokens"]) for x in row["parts"]] == [
        ("model", 3, 2),  # with the thought that the prompt opens
        ("environment", 1, 1),
        ("model", 1, 1),
    ]
    assert response_row(conversation([3, 3]), Score(1.0, True), text_of) == {"response": "bc"}


def group(*samples):
    rollouts = [dataclasses.replace(conversation([3]), truncated=cut) for cut, _ in samples]
    return Group(rollouts[0].prompt, tuple(rollouts), tuple(score for _, score in samples))


def test_the_metrics_of_a_step_are_means_over_its_episodes():
    record = record_of(played(), "", 0.5, 4.0)

    def score(known=True, **more):
        return Score(1.0, known, episode={**record, **more})

    step = [
        group((False, score(end="turns", turns=5)), (False, score(end="environment"))),
        group((True, score()), (True, score(known=False)), (False, Score(1.0, True))),
    ]
    metrics = episode_metrics(step)
    assert metrics["episode/turns"] == (5 + 3 + 3 + 3) / 4
    assert (metrics["episode/branches"], metrics["episode/dropped_tokens"]) == (2, 1)
    assert metrics["episode/truncated_frac"] == pytest.approx(2 / 3)  # of those with a reward
    assert metrics["time/episode_environment_s"] == 0.5
    assert metrics["time/episode_model_s"] == 3.5
    assert episode_metrics([group((False, Score(1.0, True)))]) == {}
    lost = episode_metrics([group((True, score(known=False)))])
    assert np.isnan(lost["episode/truncated_frac"])


def test_a_score_is_equal_to_one_of_other_seconds():
    assert Score(1.0, True, episode={"model_s": 1.0}) == Score(1.0, True)
