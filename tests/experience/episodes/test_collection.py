"""Episodes on the engine: their tokens, log-probs and routes are those of plain samples, and
everything that can go wrong is the outcome of that sample or request alone.
"""

import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time

import numpy as np
import pytest
from played import ENGINE, LOOSE, ROLL, Threads, collected, done, episodes, post, tasks, turn
from tiny import COMPUTE, EOS, MODEL, UNSET, make_prompt

from compass_jax.base.records import GIVEN
from compass_jax.rewards.faults import VerifierError
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose

OPENING = make_prompt(0, 7).tokens
REPLY = [9, 8, 7]


def own_rollouts(count, samples):
    """Returns the rollouts and the routes that the collection of plain prompts has."""
    prompts = [make_prompt(i, 7) for i in range(count)]
    buffer = RouteBuffer(ENGINE.new_routes, ENGINE.taken_routes, count, samples)
    job = Collection(
        ENGINE,
        LOOSE,
        prompts,
        samples,
        Purpose.TRAIN,
        0,
        policy_version=4,
        buffer=buffer,
        rows=[buffer.allocate() for _ in prompts],
        streams=True,
    )
    return {x.key: x for x in job}, np.asarray(job.routes)


def test_the_samples_of_one_turn_are_those_of_plain_prompts_bit_for_bit():
    def script(order, driver):
        n = order.row["n"]
        turn(order, make_prompt(n, 7).tokens)
        return done(order, reward=n / 2)

    plain, plain_routes = own_rollouts(6, 1)  # samples of one prompt would share a prefill
    with episodes(script) as played:
        job, rollouts = collected(played, tasks(6))
        assert {key: x.reward for key, x in played.verdicts.items()} == {
            key: (key.prompt - 1000) / 2 for key in plain
        }
    assert rollouts.keys() == plain.keys()
    for key, one in rollouts.items():
        other = plain[key]
        for name in ("tokens", "logp", "entropy"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        assert one.truncated == other.truncated and one.row == other.row
        assert one.versions.tolist() == [GIVEN] * 7 + [4] * other.response_length
        # the placeholder is the prompt, so that the given tokens are no part of the mask
        assert len(one.prompt.tokens) == 1 and one.sampled_length == other.sampled_length
    np.testing.assert_array_equal(np.asarray(job.routes), plain_routes)


def two_turns(order, driver):
    first = turn(order, OPENING, max_tokens=3)
    assert first["finish_reason"] in ("stop", "length")
    tokens = [*OPENING, *first["token_ids"], *REPLY]
    second = turn(order, tokens, max_tokens=4)
    return done(order, **{f"n{i}": float(x) for i, x in enumerate(second["token_ids"])})


def test_a_second_turn_continues_the_tokens_with_their_routes():
    with episodes(two_turns) as played:
        job, rollouts = collected(played, tasks(2), samples=2)
        verdicts = dict(played.verdicts)
    routes = np.asarray(job.routes)
    for key, one in rollouts.items():
        first = one.versions[7:]
        turns = [x for x in np.split(first, np.flatnonzero(np.diff(first)) + 1)]
        assert [set(x) for x in turns] == [{4}, {GIVEN}, {4}]
        start = 7 + len(turns[0])
        assert one.tokens[start : start + 3].tolist() == REPLY
        assert not one.logp[start : start + 3].any() and np.all(one.logp[start + 3 :] < 0)
        # of the model's last turn no token is an input yet
        set_rows = np.all(routes[one.row] != UNSET, axis=(1, 2))
        np.testing.assert_array_equal(set_rows, np.arange(len(set_rows)) < len(one.tokens) - 1)
        record = verdicts[key].episode
        assert (record["turns"], record["branches"], record["dropped_tokens"]) == (2, 1, 0)
        assert [end for end, *_ in record["replies"]] == [start, len(one.tokens)]
        assert verdicts[key].components["n0"] == one.tokens[start + 3]
    # samples of one prompt draw different numbers, and a repeated episode the same ones
    with episodes(two_turns) as played:
        _, again = collected(played, tasks(2), samples=2)
    for key, one in rollouts.items():
        np.testing.assert_array_equal(one.tokens, again[key].tokens)
        np.testing.assert_array_equal(one.logp, again[key].logp)
    assert len({tuple(x.tokens) for x in rollouts.values()}) > 2


def test_held_slots_change_no_sample_and_are_free_at_the_end():
    results = {}
    for name, hold in (("held", True), ("prefilled", False)):
        rollout = dataclasses.replace(ROLL, prompt_buckets=(8, 32), hold_sessions=hold)
        each = Engine(MODEL, COMPUTE, rollout, EOS)
        with episodes(two_turns) as played:
            job, rollouts = collected(played, tasks(2), samples=2, engine=each)
        results[name] = rollouts, np.asarray(job.routes), job.stats.prefill_tokens
        assert len(job.batcher.slots.free()) == ROLL.slots
    (held, routes, fewer), (plain, expected, more) = results.values()
    for key, one in held.items():
        np.testing.assert_array_equal(one.tokens, plain[key].tokens)
        np.testing.assert_allclose(one.logp, plain[key].logp, atol=2e-5)
    np.testing.assert_array_equal(routes, expected)
    assert fewer == 4 * (len(OPENING) + len(REPLY) + 1) < more


def test_a_history_that_was_written_anew_is_a_branch_and_the_longest_one_is_trained():
    def script(order, driver):
        short = turn(order, OPENING, max_tokens=2)["token_ids"]
        other = turn(order, OPENING[::-1], max_tokens=6)["token_ids"]
        again = turn(order, OPENING, max_tokens=2)["token_ids"]
        return done(order, short=len(short), other=len(other), same=float(short == again))

    with episodes(script) as played:
        _, rollouts = collected(played, tasks(1), samples=4)
        verdicts = played.verdicts
        for key, one in rollouts.items():
            parts = verdicts[key].components
            assert verdicts[key].episode["branches"] == 3
            longest = max(parts["short"], parts["other"])
            assert one.sampled_length == longest
            own = parts["other"] > parts["short"]
            assert one.tokens[:7].tolist() == (OPENING[::-1] if own else OPENING).tolist()
            # only the first branch has routes
            assert (one.row == key.index) == (not own)
            total = verdicts[key].episode["dropped_tokens"] + one.sampled_length
            assert verdicts[key].episode["branch"] == own
            assert total >= parts["short"] + parts["other"] + 1
        # branches share no noise
        assert not all(verdicts[key].components["same"] for key in rollouts)


def test_the_branch_of_the_agent_that_the_verdict_names_is_trained():
    def script(order, driver):
        def asked(agent, tokens, limit):
            body = {"token_ids": list(map(int, tokens)), "sampling_params": {"max_tokens": limit}}
            status, reply = post(order.url, body, **{"X-Session-ID": agent})
            assert status == 200
            return reply["choices"][0]["token_ids"]

        first = asked("first", OPENING, 2)
        long = asked("second", OPENING, 9)
        # the other agent's history is no history of the first one
        again = asked("first", [*OPENING, *first, *REPLY], 2)
        message = done(order, long=float(len(long)), own=float(len(first) + len(again)))
        message["done"]["agent"] = "first"
        return message

    with episodes(script) as played:
        _, rollouts = collected(played, tasks(1), samples=2)
        for key, one in rollouts.items():
            parts, record = played.verdicts[key].components, played.verdicts[key].episode
            assert record["branches"] == 2
            assert one.sampled_length == parts["own"]
            assert record["dropped_tokens"] == parts["long"]


def test_a_verdict_on_an_agent_that_sampled_nothing_is_an_error():
    def script(order, driver):
        turn(order, OPENING, max_tokens=2)
        return {"done": {"session": order.session, "reward": 1.0, "agent": "another"}}

    with episodes(script) as played:
        collected(played, tasks(1))
        (verdict,) = played.verdicts.values()
    assert not verdict.known and "without a sampled token" in verdict.detail


def test_several_requests_of_an_episode_and_plain_samples_decode_together():
    started = threading.Barrier(3)

    def script(order, driver):
        replies = []

        def ask(tokens):
            started.wait(30)  # all three are at the door
            replies.append(turn(order, tokens, max_tokens=5)["token_ids"])

        threads = [threading.Thread(target=ask, args=(OPENING + i,)) for i in range(3)]
        [x.start() for x in threads]
        [x.join() for x in threads]
        return done(order, replies=float(len(replies)))

    plain = make_prompt(5, 8)
    with episodes(script) as played:
        _, rollouts = collected(played, [*tasks(1), plain])
        assert played.verdicts[tasks(1)[0].sample(0)].components["replies"] == 3
    assert rollouts.keys() == {tasks(1)[0].sample(0), plain.sample(0)}


WRONG = {
    "empty": ({"token_ids": []}, "the prompt is empty"),
    "unknown ids": ({"token_ids": [MODEL.vocab_size]}, "token ids must be from 0"),
    "too long to begin": (
        {"token_ids": [2] * 17},
        "17 tokens continue no earlier request, and a new one has at most 16; shorten it, or raise"
        " rollout.prompt_buckets[-1]",
    ),
    "no room": (
        {"token_ids": [2] * 40},
        "40 tokens leave no room for a reply: the maximum context length of an episode is 40"
        " tokens; end it, or raise rollout.max_new_tokens",
    ),
    "more than all": (
        {"token_ids": [2] * 41},
        "the prompt has 41 tokens, this server takes 40: shorten it, or raise"
        " rollout.prompt_buckets[-1] + rollout.max_new_tokens",
    ),
    "another temperature": (
        {"token_ids": [2], "sampling_params": {"temperature": 0.5}},
        "temperature = 0.5: the run samples with 1",
    ),
    "top-k": ({"token_ids": [2], "sampling_params": {"top_k": 5}}, "top_k = 5"),
    "a seed": ({"token_ids": [2], "sampling_params": {"seed": 5}}, "leave the seed out"),
    "a stop token": (
        {"token_ids": [2], "sampling_params": {"stop_token_ids": [1, 5]}},
        "stop_token_ids has 5: turns end at [1]",
    ),
    "another model": ({"model": "gpt", "token_ids": [2]}, "is not served here"),
    "no JSON": (b"{", "the body"),
}


def test_a_wrong_request_is_refused_and_the_episode_goes_on():
    answers = {}

    def script(order, driver):
        for name, (body, _) in WRONG.items():
            answers[name] = post(order.url, body)
        answers["a gigabyte"] = post(order.url, b" ", **{"content-length": str(2**30)})
        other = order.url[:-4] + "AAAA"
        answers["another session"] = post(other, {"token_ids": [2]})
        base = order.url.rpartition("/s/")[0]
        answers["no session"] = post(base, {"token_ids": [2]})
        neutral = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop_token_ids": [1]}
        body = {"token_ids": [2], "sampling_params": {**neutral, "max_tokens": 2}}
        answers["right"] = post(base, body, **{"X-Session-ID": order.session})
        return done(order)

    with episodes(script) as played:
        _, rollouts = collected(played, tasks(1))
        assert [x.reward for x in played.verdicts.values()] == [1.0]
    for name, (_, message) in WRONG.items():
        status, reply = answers[name]
        assert status in (400, 404, 413) and message in reply["error"]["message"], (name, reply)
    assert answers["a gigabyte"][0] == 413
    for name in ("another session", "no session"):
        status, reply = answers[name]
        assert status == 404 and "no episode with this session" in reply["error"]["message"]
    assert answers["right"][0] == 200
    (one,) = rollouts.values()
    assert one.tokens[0] == 2 and len(one.tokens) <= 3


def after_a_turn(message):
    def script(order, driver):
        turn(order, OPENING, max_tokens=2)
        return message(order) if callable(message) else message

    return script


UNUSABLE = {
    "NaN": (lambda order: done(order, reward=float("nan")), "reward is NaN"),
    "infinite": (lambda order: done(order, reward=float("inf")), "reward = inf is no finite"),
    "no number": (lambda order: done(order, reward="high"), "reward = 'high' is no finite"),
    "a truth value": (lambda order: done(order, reward=True), "reward = True is no finite"),
    "missing": (lambda order: {"done": {"session": order.session}}, "gave no reason"),
    "a name": (lambda order: done(order, **{"a b": 1.0}), "names of letters"),
    "a metric": (lambda order: done(order, a="x"), "a = 'x' is no finite"),
    "a reason": (
        lambda order: {"failed": {"session": order.session, "detail": "the shop is closed"}},
        "the shop is closed",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_verdict_that_cannot_be_used_is_an_error_with_its_reason(name):
    message, reason = UNUSABLE[name]
    with episodes(after_a_turn(message)) as played:
        _, rollouts = collected(played, tasks(1))
        (verdict,) = played.verdicts.values()
    assert not verdict.known and verdict.outcome == "error" and reason in verdict.detail
    (one,) = rollouts.values()
    assert one.sampled_length > 0  # its tokens are accounted for


def test_an_episode_without_a_sampled_token_has_no_reward():
    with episodes(lambda order, driver: done(order)) as played:
        _, rollouts = collected(played, tasks(1))
        (verdict,) = played.verdicts.values()
    assert not verdict.known and "without a sampled token" in verdict.detail
    (one,) = rollouts.values()
    assert one.sampled_length == 0 and len(one.tokens) == 1


def test_an_environment_has_its_time_and_the_models_does_not_count():
    late = {}

    def script(order, driver):
        for _ in range(3):
            turn(order, OPENING, max_tokens=2)
        if order.row["n"]:
            time.sleep(3)
            late["status"], late["reply"] = post(order.url, {"token_ids": [2]})
        return done(order)

    drivers = []
    with episodes(script, drivers, timeout_s=1.0) as played:
        collected(played, tasks(2))
        verdicts = {key.prompt - 1000: x for key, x in played.verdicts.items()}
        assert verdicts[0].known
        assert (verdicts[1].known, verdicts[1].outcome) == (False, "timeout")
        assert "timeout_s = 1" in verdicts[1].detail
        (driver,) = drivers
        assert len(driver.cancelled) == 1
        while not late:
            time.sleep(0.05)
    assert late["status"] == 404


def test_an_environment_is_charged_for_its_own_time_alone(monkeypatch):
    """Neither for the start of its driver, nor while the trainer's thread is busy."""
    drivers = []

    def script(order, driver):
        if not driver.ready:
            time.sleep(2)
            driver.say(ready=True)
        for _ in range(3):
            turn(order, OPENING, max_tokens=2)
        return done(order)

    def start(self, *arguments):
        init(self, *arguments)
        self.ready = False

    init = Threads.__init__
    monkeypatch.setattr(Threads, "__init__", start)
    with episodes(script, drivers, timeout_s=1.0) as played:
        collected(played, tasks(1), enough=lambda: time.sleep(0.4))
        (verdict,) = played.verdicts.values()
    assert verdict.known
    assert verdict.episode["environment_s"] < 0.5 < verdict.episode["model_s"]


def test_a_driver_that_never_starts_is_a_timeout_of_its_episodes(monkeypatch):
    monkeypatch.setattr("compass_jax.experience.episodes.collection.START_S", 0.2)

    def script(order, driver):
        driver.ready = False

    with episodes(script) as played:
        collected(played, tasks(1))
        (verdict,) = played.verdicts.values()
    assert (verdict.known, verdict.outcome) == (False, "timeout")
    assert "its driver was not ready after 0.2 s" in verdict.detail


def test_why_an_episode_ended_is_what_its_driver_says():
    def script(order, driver):
        turn(order, OPENING, max_tokens=2)
        message = done(order)
        message["done"]["end"] = [None, 7, "", "x" * 300][order.row["n"]]
        return message

    with episodes(script) as played:
        collected(played, tasks(4))
        ends = {key.prompt - 1000: x.episode.get("end") for key, x in played.verdicts.items()}
    assert ends == {0: None, 1: None, 2: None, 3: "x" * 200}


DEATH = "the driver failed: its process ended with status 7"


def test_the_episodes_of_a_driver_that_dies_are_played_anew_with_the_same_draws():
    """One has ended, one waits for its environment, and one for a turn."""
    drivers, died = [], threading.Event()

    def script(order, driver):
        choice = turn(order, OPENING, max_tokens=3)
        if len(drivers) == 1 and order.row["n"]:
            if order.row["n"] == 1:
                time.sleep(0.3)
                driver.die(DEATH)
                died.set()
                return None
            died.wait(30)
        tokens = [*OPENING, *choice["token_ids"], *REPLY]
        status, _ = post(
            order.url, {"token_ids": list(map(int, tokens)), "sampling_params": {"max_tokens": 4}}
        )
        return done(order) if status == 200 else None

    def results(script):
        with episodes(script, drivers) as played:
            job, rollouts = collected(played, tasks(3), samples=2)
            assert all(x.known for x in played.verdicts.values())
            assert len(job.batcher.slots.free()) == ROLL.slots
        return rollouts, np.asarray(job.routes)

    rollouts, routes = results(script)
    assert len(drivers) == 2
    undisturbed, expected = results(script)  # its driver is the third
    for key, one in rollouts.items():
        for name in ("tokens", "logp", "entropy", "versions"):
            measured = getattr(undisturbed[key], name)
            np.testing.assert_array_equal(getattr(one, name), measured, err_msg=name)
    np.testing.assert_array_equal(routes, expected)


def test_an_episode_that_always_ends_its_driver_is_an_error_with_its_reason():
    ended = []

    def script(order, driver):
        turn(order, OPENING, max_tokens=2)
        if order.row["n"]:
            while not ended:  # another episode ends before
                time.sleep(0.01)
            return driver.die(DEATH)
        ended.append(1)
        return done(order)

    with episodes(script) as played:
        _, rollouts = collected(played, tasks(2))
        verdicts = {key.prompt - 1000: x for key, x in played.verdicts.items()}
    assert verdicts[0].known and len(rollouts) == 2
    assert (verdicts[1].known, verdicts[1].outcome) == (False, "error")
    assert f"{DEATH}. The driver ended 3 times while" in verdicts[1].detail


def test_a_driver_that_always_dies_ends_the_run():
    def script(order, driver):
        driver.die(DEATH)

    with episodes(script) as played:
        collected(played, tasks(1))
        (verdict,) = played.verdicts.values()
        assert not verdict.known and DEATH in verdict.detail
        with pytest.raises(VerifierError, match="ended 4 times without an episode"):
            collected(played, tasks(1))


def test_an_environment_that_cannot_be_loaded_ends_the_run_with_the_reason():
    def script(order, driver):
        return {"refused": "env = 'none:Own': no module"}

    with (
        episodes(script) as played,
        pytest.raises(VerifierError, match="none:Own: env = 'none:Own': no module"),
    ):
        collected(played, tasks(1))


def test_a_driver_names_no_session_of_another_and_no_unknown_one():
    def script(order, driver):
        driver.say(done={"session": "unknown", "reward": 1.0})
        driver.say(done=7)
        driver.say(failed={})
        turn(order, OPENING, max_tokens=2)
        return done(order, reward=0.5)

    with episodes(script) as played:
        collected(played, tasks(2))
        assert [x.reward for x in played.verdicts.values()] == [0.5, 0.5]


def test_a_stop_ends_all_episodes_and_their_requests():
    answered = []

    def script(order, driver):
        while True:
            status, _ = post(order.url, {"token_ids": [2], "sampling_params": {"max_tokens": 20}})
            answered.append(status)
            if status != 200:
                return None

    drivers = []
    with episodes(script, drivers) as played:
        _, rollouts = collected(played, tasks(2), samples=2, enough=lambda: len(answered) >= 4)
        assert not rollouts and not played.verdicts
        assert len(drivers[0].cancelled) == 4
        deadline = time.monotonic() + 30
        while sum(x != 200 for x in answered) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert sorted(set(answered))[-1] in (404, 409) and sum(x != 200 for x in answered) == 4


def leave_during(order, tokens):
    """Asks for a turn after these tokens, and closes the connection before the reply."""
    host, _, path = order.url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host)
    params = {"max_tokens": 20}
    body = json.dumps({"token_ids": list(map(int, tokens)), "sampling_params": params})
    headers = {"content-type": "application/json"}
    connection.request("POST", f"/{path}/inference/v1/generate", body, headers)
    connection.close()


def test_a_client_that_leaves_ends_its_request(monkeypatch):
    monkeypatch.setattr("compass_jax.rollout.serving.door.WATCH_S", 0.01)

    def script(order, driver):
        leave_during(order, [2])
        time.sleep(0.5)  # less than the request's five ticks
        turn(order, OPENING, max_tokens=3)
        return done(order)

    def slow_tick():
        time.sleep(0.2)

    with episodes(script) as played:
        collected(played, tasks(1), enough=slow_tick)
        (verdict,) = played.verdicts.values()
    # Its branch is begun again in its place, and nothing that it sampled is counted.
    assert verdict.known
    assert (verdict.episode["branches"], verdict.episode["dropped_tokens"]) == (1, 0)


def test_verdicts_that_no_buffer_has_are_in_the_state():
    with episodes(after_a_turn(lambda order: done(order, reward=0.25))) as played:
        collected(played, tasks(2))
        state = json.loads(json.dumps(played.state()))
        before = dict(played.verdicts)
        played.verdicts.clear()
        played.restore(state)
        assert played.verdicts == before and len(before) == 2


def test_plain_collections_play_no_episode():
    with pytest.raises(Exception, match="compass train, eval and try alone play"):
        list(Collection(ENGINE, LOOSE, tasks(1), 1, Purpose.EVAL, 0))


def test_the_door_holds_a_connection_for_each_sample_of_a_large_step():
    """A turn holds its connection until it is sampled, and those of idle clients stay open."""

    def script(order, driver):
        host = order.url.removeprefix("http://").partition("/")[0]
        address, _, port = host.partition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(600):
                stack.enter_context(socket.create_connection((address, int(port))))
            turn(order, OPENING, max_tokens=2)
        return done(order)

    with episodes(script) as played:
        collected(played, tasks(1))
        assert all(score.known for score in played.verdicts.values())
