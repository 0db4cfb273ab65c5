"""Runs whose samples come from a sampler, here a thread of the same process over loopback: the
numbers of each variant of the loop, broken messages, and refused settings.
"""

import contextlib
import os
import signal
import threading
import time

import pytest
from evolve import evolve
from logged import CLOCKS, lines, numbers
from processes import free_port
from test_processes import compare
from tiny_run import tiny_run
from variants import VARIANTS, configured, limit_lengths

from compass_jax.commands.dry_run import run_dry
from compass_jax.config import ConfigError, EngineJudgeConfig
from compass_jax.config.samplers import parse_address
from compass_jax.rollout.drafts import Lenient
from compass_jax.rollout.remote import frames, serve
from compass_jax.rollout.remote.frames import KEY_VARIABLE, Message, SamplersError
from compass_jax.rollout.remote.leader import MOST_BROKEN
from compass_jax.rollout.remote.serve import SamplerLoop
from compass_jax.training.rl import run_rl

LEFT_OUT = (*CLOCKS, "guard/loss_spike")  # a spike of small differences depends on rounding
# In partial rollouts with a sampler, a clock decides which samples are unfinished at the end.
REPEATABLE = sorted(
    name
    for name in VARIANTS
    if not name.startswith("partial")
    and not {"drafts", "entropy"} & set(name.replace(",", "").split())
)
QUICK = ("one step off", "growing", "replay, R2", "stages", "average")


@pytest.fixture
def address(monkeypatch):
    """Returns the address of a run, and sets the key that training and samplers share."""
    monkeypatch.setenv(KEY_VARIABLE, "a key of more than sixteen characters")
    return f"127.0.0.1:{free_port()}"


@contextlib.contextmanager
def sampler(address, after=None, patience=60):
    """Runs a sampler in a thread, which must end when the training does. Yields a list for its
    error. The sampler starts when the thread `after` has ended, and ends
    `patience` seconds after the last connection.
    """
    errors = []

    def run():
        if after is not None:
            after.join(60)
        try:
            SamplerLoop(address, patience).run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield errors
    thread.join(60)
    assert not thread.is_alive()


def responses(directory):
    return [
        [(x["response"], x["reward"]) for x in row["samples"]]
        for row in lines(directory, "rollouts")
    ]


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in REPEATABLE],
)
def test_every_variant_has_the_numbers_of_a_local_rollout(variant, undisturbed, address, tmp_path):
    config = evolve(configured(variant, tmp_path), samplers={"address": address})
    with sampler(address) as errors:
        run_rl(config)
    assert not errors
    expected, _ = undisturbed(variant)
    # the order in which samples share slots and prefills changes how floats round
    compare(numbers(tmp_path, LEFT_OUT), numbers(expected, LEFT_OUT), tolerance=1e-4)
    assert responses(tmp_path) == responses(expected)


@pytest.mark.parametrize("variant", ["partial"])
def test_unfinished_samples_are_carried_into_the_next_step(variant, address, tmp_path, monkeypatch):
    limit_lengths(monkeypatch)
    config = evolve(configured(variant, tmp_path), samplers={"address": address})
    with sampler(address) as errors:
        run_rl(config)
    assert not errors
    rows = [row["metrics"] for row in lines(tmp_path)]
    assert len(rows) == config.rl.steps
    assert any(row["rollout/carried_tokens"] > 0 for row in rows)
    assert max(row["staleness_max"] for row in rows) > 0
    # log-probs of the tokens before and after a cut are those of their policies
    assert rows[0]["mismatch/logp_abs_diff"] < 1e-5


def test_drafts_are_refused():
    config = evolve(tiny_run(), rl={"drafts": Lenient()}, samplers={"address": "here:1"})
    with pytest.raises(ConfigError, match=r"rl\.drafts with samplers"):
        config.validate_for_rl()


def test_a_sampler_with_another_key_is_not_let_in(address, tmp_path, monkeypatch):
    """It ends with the reason, and the run continues with one that has the key."""
    config = evolve(configured("plain", tmp_path), samplers={"address": address})
    wrong = "another key of more than sixteen"
    environment_of = {"wrong": wrong}
    real = frames.secret

    def secret():
        name = threading.current_thread().name
        return environment_of.get(name, "").encode() or real()

    monkeypatch.setattr(frames, "secret", secret)
    refused = []

    def run():
        try:
            SamplerLoop(address, 60).run()
        except SamplersError as error:
            refused.append(str(error))

    thread = threading.Thread(target=run, name="wrong")
    thread.start()
    with sampler(address, after=thread) as errors:
        run_rl(config)
    assert refused == [f"the training has another {KEY_VARIABLE}"] and not errors


def test_a_sampler_of_another_version_is_refused(address, tmp_path, monkeypatch):
    config = evolve(configured("plain", tmp_path), samplers={"address": address})
    real, threads = serve.hello, []

    def hello():  # by thread: a sampler whose first connection breaks says it again
        threads.append(me := threading.get_ident())
        return real() | ({"version": "0.0.1"} if me == threads[0] else {})

    monkeypatch.setattr(serve, "hello", hello)
    with sampler(address) as first, sampler(address) as second:
        run_rl(config)
    (error,) = [*first, *second]
    assert "version '0.0.1', not" in str(error)


def test_a_sampler_that_no_training_calls_ends(address):
    with pytest.raises(SamplersError, match=r"no training at 127\.0\.0\.1:\d+ for 1 s.*--patience"):
        SamplerLoop(address, 1).run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samplers": {"address": "7070"}}, r"samplers\.address = '7070': must be host:port"),
        (
            {"samplers": {"address": "a:1", "lockstep": False}},
            r"samplers\.lockstep = False without rl\.one_step_off",
        ),
        ({"samplers": {"address": "a:1"}, "rollout_apart": True}, "samplers with rollout_apart"),
        (
            {
                "samplers": {"address": "a:1"},
                "rewards": {"judge": EngineJudgeConfig(prompt_buckets=(32,), max_tokens=8)},
            },
            "samplers with a judge on the rollout's engine",
        ),
    ],
)
def test_settings_that_cannot_act_together_are_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        evolve(configured("plain", tmp_path), **changes).validate_for_rl()


@pytest.mark.parametrize("key", [None, "short"])
def test_training_and_samplers_need_a_key(key, tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(KEY_VARIABLE, key)
    config = evolve(configured("plain", tmp_path), samplers={"address": "127.0.0.1:7070"})
    with pytest.raises(ConfigError, match=r"COMPASS_SAMPLERS_KEY has \d characters: set it"):
        run_rl(config)
    with pytest.raises(ConfigError, match="COMPASS_SAMPLERS_KEY has"):
        SamplerLoop("127.0.0.1:7070", 1)
    with pytest.raises(ConfigError, match="COMPASS_SAMPLERS_KEY has"):
        run_dry(config, "train")


def test_a_stop_ends_a_run_that_waits_for_samplers(address, tmp_path):
    config = evolve(configured("plain", tmp_path), samplers={"address": address})
    threading.Timer(5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SamplersError, match="asked to stop while it waited for samplers") as error:
        run_rl(config)
    assert error.value.exit_status == 143
    with sampler(address):  # at the same address, in the same process
        assert run_rl(config)["steps"] == config.rl.steps


BROKEN = {
    "an unknown kind": [Message("stop")],
    "a hello of no role": [Message("hello", {"role": "judge"})],
    "no needs": [Message("needs", {"settings": 1})],
    "tokens that are not there": [Message("done", {"job": 1, "samples": [0], "stats": {}}, {})],
    "samples of another form": [Message("done", {"job": 1, "samples": [[0]], "stats": {}})],
    "unknown counters": [Message("done", {"job": 1, "samples": [], "stats": {"x": 1}})],
    "a layout that nobody has": [
        Message("needs", {"settings": 1, "needs": [[[[[0, 10**6]]]]]}),
    ],
}


@pytest.mark.parametrize("messages", BROKEN.values(), ids=BROKEN)
def test_a_broken_message_ends_its_connection_and_not_the_run(messages, address, tmp_path):
    config = evolve(configured("plain", tmp_path), samplers={"address": address})

    thread = threading.Thread(target=disturb, args=(address, messages))
    thread.start()
    with sampler(address) as errors:
        assert run_rl(config)["steps"] == config.rl.steps
    thread.join(60)
    assert not thread.is_alive() and not errors


def disturb(address, messages):
    """Connects, sends the messages and waits until the connection ends."""
    while True:
        try:
            connection = frames.connect(parse_address(address, "address"))
            break
        except OSError:
            time.sleep(0.05)
    for message in [Message("hello", {**serve.hello(), "name": "odd"}), *messages]:
        frames.send(connection, frames.encode(message))
    with contextlib.suppress(EOFError, OSError):
        while frames.decode(frames.receive(connection)).kind != "refused":
            pass
    connection.close()


def test_many_broken_messages_that_are_no_results_do_not_end_the_run(address, tmp_path):
    """A sampler of another version that comes again and again must not end a sound run."""
    config = evolve(configured("plain", tmp_path), samplers={"address": address})
    visits = []

    def come_again():
        for _ in range(MOST_BROKEN + 3):
            disturb(address, BROKEN["no needs"])
            visits.append(1)

    thread = threading.Thread(target=come_again)
    thread.start()
    with sampler(address, after=thread) as errors:
        assert run_rl(config)["steps"] == config.rl.steps
    assert len(visits) > MOST_BROKEN and not errors


def test_a_sampler_whose_results_are_always_broken_ends_the_run(address, tmp_path, monkeypatch):
    real = serve.results

    def results(*arguments):
        kind, fields, arrays = real(*arguments)
        return Message(kind, fields | {"samples": [[n] for n in fields["samples"]]}, arrays)

    monkeypatch.setattr(serve, "results", results)
    config = evolve(configured("plain", tmp_path), samplers={"address": address})
    message = r"the first 5 results of samplers are broken, the last from .*: a sample is \[\d+\]"
    with sampler(address, patience=5), pytest.raises(SamplersError, match=message):
        run_rl(config)


@pytest.mark.parametrize("host", ["0.0.0.0", "no-such-host.invalid"])
def test_an_address_that_samplers_cannot_reach_is_refused(host, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "a key of more than sixteen characters")
    config = evolve(configured("plain", tmp_path), samplers={"address": f"{host}:7070"})
    with pytest.raises(SamplersError, match=r"samplers\.address: (no host|'0\.0\.0\.0' is 0\.0)"):
        run_rl(config)


def test_an_address_of_another_host_cannot_be_listened_on(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "a key of more than sixteen characters")
    config = evolve(configured("plain", tmp_path), samplers={"address": "192.0.2.1:7070"})
    with pytest.raises(SamplersError, match=r"samplers\.address = '192\.0\.2\.1:7070': this"):
        run_rl(config)
