"""Hostile answers and verifiers: each gets the expected outcome, writes nothing outside and leaves
no process, and the next answer's score is right."""

import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from corpus import ANSWERS, DATASETS, LONG_S, VERIFIERS
from test_score import descendants, drain, judged_by, wait_until

from compass_jax.base.records import Prompt, Score
from compass_jax.config import ConfigError, DataConfig, FileSource, ProceduralSource, RewardConfig
from compass_jax.data.procedural import distinct_entries
from compass_jax.devices.processes import guards
from compass_jax.rewards import detect
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.rows import encode_row

MISSING = detect.missing_guards()
guarded = pytest.mark.skipif(bool(MISSING), reason=f"this machine has no {', '.join(MISSING)}")
LIMIT_S = 1.5


DATA = judged_by("corpus_verifiers:act")


def prompt(number=0, source=0, answer="7", entry=None):
    row = encode_row({"answer": answer} if entry is None else entry)
    return Prompt(number, source, "x", "q", np.zeros(1, np.int32), answer, row)


@pytest.fixture(scope="module")
def places():
    """Yields the places that a text can name: a folder that must stay empty, a file that must stay
    secret and unchanged, a port, and this process. Every user may enter, read and write them, so
    that only the guards protect them (pytest's own temporary folder is private to its user).
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        out, secret = Path(folder, "out"), Path(folder, "secret", "secret")
        out.mkdir()
        secret.parent.mkdir()
        secret.write_text("secret")
        secret.chmod(0o666)
        for path in (Path(folder), out, secret.parent):
            path.chmod(0o777)
        yield {
            "out": out,
            "secret": secret,
            "judge": guards.__file__,
            "me": os.getpid(),
            "port": server.getsockname()[1],
        }


@pytest.fixture(scope="module")
def verifiers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPASS_TOKEN", "secret")
        with Scorer(RewardConfig(workers=1, timeout_s=LIMIT_S), DATA) as scorer:
            scorer.wait_ready()
            yield scorer


@pytest.fixture(scope="module")
def answers():
    """Yields a scorer with every data set that evaluates answers, math-verify, and one data set
    that compares; and an entry of each data set.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        sources = (
            *(ProceduralSource(name, size=3) for name in DATASETS),
            FileSource("unused.jsonl"),
        )
        entries = [distinct_entries(source, 0)[0] for source in sources[:-1]]
        with Scorer(
            RewardConfig(workers=1, timeout_s=20.0, answer_tag=""), DataConfig(sources=sources)
        ) as scorer:
            scorer.wait_ready()
            yield scorer, entries


def assert_nothing_is_left(scorer, places, before):
    assert (
        not os.listdir(places["out"])
        and places["secret"].read_text() == "secret"
        and not os.path.exists("/dev/shm/compass-ran")
    )
    worker = scorer._workers[0].process.pid
    assert before == worker, "the worker was not replaced"
    assert wait_until(lambda: len(descendants(worker)) == 1), (
        "the process that answers, and nobody else"
    )
    assert f"{LONG_S}" not in " ".join(programs())
    assert "corpus_verifiers" not in sys.modules and all(x.is_alive() for x in scorer._threads)


def programs():
    """Yields the command lines of all processes."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline") as file:
                yield file.read()
        except OSError:
            continue


@guarded
@pytest.mark.parametrize("name", VERIFIERS)
def test_a_hostile_verifier_gets_what_it_must(name, verifiers, places):
    text, expected = VERIFIERS[name]
    before = verifiers._workers[0].process.pid
    verifiers.submit("row", prompt(), text.format(**places))
    verifiers.submit("next", prompt(), "0.25")
    verifiers.submit("next but one", prompt(), "0.75")
    got = drain(verifiers)
    row = got["row"]
    if isinstance(expected, float):
        assert row == Score(expected, True)
    else:
        assert row.outcome == expected and not row.known
    assert got["next"] == Score(0.25, True) and got["next but one"] == Score(0.75, True)
    assert_nothing_is_left(verifiers, places, before)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_hostile_answer_is_wrong(name, answers, places):
    scorer, entries = answers
    kind, text, right = ANSWERS[name]
    source = DATASETS.index(kind) if kind in DATASETS else len(DATASETS)
    before = scorer._workers[0].process.pid
    question, right, wrong = prompt(answer=right.format(), source=source), right.format(), "1234"
    if kind != "math":
        right, wrong = entries[source]["answer"], "1"
        question = prompt(source=source, answer=right, entry=entries[source])
    for key, response in {"row": text.format(**places), "right": right, "wrong": wrong}.items():
        scorer.submit(key, question, response)
    scores = {"row": Score(0.0, True), "right": Score(1.0, True), "wrong": Score(0.0, True)}
    assert drain(scorer) == scores
    assert_nothing_is_left(scorer, places, before)


WITHOUT = [
    ((guards.LANDLOCK, guards.MOUNTS), "writes outside"),
    ((guards.LANDLOCK,), "reads a secret"),
    ((guards.PROCESSES,), "has a parent"),
    ((guards.SECCOMP,), "opens a socket"),
    ((guards.SECCOMP, guards.NETWORK, guards.LANDLOCK), "connects"),
]


@guarded
@pytest.mark.parametrize(("missing", "name"), WITHOUT, ids=lambda value: str(value))
def test_without_its_guard_a_row_gets_through(missing, name, tmp_path, places):
    left = tuple(guard for guard in guards.GUARDS if guard not in missing)
    tmp_path.chmod(0o777)
    with Scorer(RewardConfig(timeout_s=20.0), DATA, guards=left) as scorer:
        text = VERIFIERS[name][0].format(**places | {"out": tmp_path})
        scorer.submit(0, prompt(), text)
        assert drain(scorer)[0] == Score(1.0, True)
    assert os.listdir(tmp_path) == (["ran"] if name.startswith("writes") else [])


FEWER = {
    "leaves a program": "ok",
    "leaves a daemon": "ok",
    "kills its parent": "error",
    "kills another": "error",
    "kills everybody": "error",
    "hangs with children": "timeout",
}


@guarded
def test_without_namespaces_nobody_outlives_and_nobody_is_killed(places):
    """Landlock and seccomp are the only guards in a container that may not make namespaces."""
    remaining_guards = (guards.LANDLOCK, guards.SECCOMP)
    with Scorer(RewardConfig(timeout_s=LIMIT_S), DATA, guards=remaining_guards) as scorer:
        scorer.wait_ready()
        before = scorer._workers[0].process.pid
        for name in FEWER:
            scorer.submit(name, prompt(), VERIFIERS[name][0].format(**places))
        scorer.submit("next", prompt(), "0.25")
        scores = drain(scorer)
        assert scores.pop("next") == Score(0.25, True)
        assert {name: score.outcome for name, score in scores.items()} == FEWER
        assert_nothing_is_left(scorer, places, before)


OFF = {"patches itself": 0.5, "opens a socket": 1.0, "leaves a daemon": 0.5, "exits 0": "crash"}


def test_off_means_no_guards_and_still_a_child_for_each_answer(places):
    with Scorer(RewardConfig(timeout_s=LIMIT_S, sandbox="off"), DATA) as scorer:
        scorer.wait_ready()
        before = scorer._workers[0].process.pid
        for number, name in enumerate(OFF):
            scorer.submit(name, prompt(), VERIFIERS[name][0])
            scorer.submit(number, prompt(), f"{number} / 4")
        got = drain(scorer)
        assert [got[n].reward for n in range(4)] == [0.0, 0.25, 0.5, 0.75]
        assert {
            name: got[name].reward if got[name].known else got[name].outcome for name in OFF
        } == OFF
        assert_nothing_is_left(scorer, places, before)


def test_required_names_the_missing_guard_and_auto_says_it():
    missing = {guards.LANDLOCK: "Function not implemented"}
    with pytest.raises(
        ConfigError, match=r"rewards.sandbox = 'required'.*Landlock \(Function not implemented\)"
    ):
        Scorer(RewardConfig(sandbox="required"), DATA, missing=missing)
    assert guards.LANDLOCK not in detect.guards_for("auto", missing)
    assert detect.guards_for("off") == () and "this user's files" in detect.notice("off")
    assert "missing: Landlock (Function not impl" in detect.notice("auto", missing)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e9])
def test_a_time_limit_that_is_none_is_refused(seconds):
    with pytest.raises(ConfigError, match=r"rewards.timeout_s = "):
        RewardConfig(timeout_s=seconds).validate()


def test_closing_in_the_middle_of_a_hang_leaves_nobody(places):
    with Scorer(RewardConfig(timeout_s=600), DATA) as scorer:
        scorer.submit(0, prompt(), VERIFIERS["hangs with children"][0])
        worker = scorer._workers[0].process.pid
        assert wait_until(lambda: len(descendants(worker)) >= 7)
        start = time.monotonic()
    assert time.monotonic() - start < 10 and f"{LONG_S}" not in " ".join(programs())
