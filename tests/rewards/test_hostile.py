"""Hostile answers and verifiers: each gets what it must, writes nothing outside, leaves no process,
and the next answer's score is right.
"""

import logging
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from corpus import ANSWERS, DATASETS, VERIFIERS
from test_score import descendants, drain, judged_by, wait_until

from compass_jax.config import ConfigError, DataConfig, FileSource, ProceduralSource, RewardConfig
from compass_jax.data.procedural import distinct_entries
from compass_jax.records import Prompt, Score
from compass_jax.rewards import detect
from compass_jax.rewards.score import Scorer
from compass_jax.tasks.rows import encode_row
from compass_jax.verifiers import guards

MISSING = detect.missing_guards()
guarded = pytest.mark.skipif(bool(MISSING), reason=f"this machine has no {', '.join(MISSING)}")
LIMIT_S = 1.5


DATA = judged_by("corpus_verifiers:act")


def prompt(number=0, source=0, answer="7", entry=None):
    row = encode_row({"answer": answer} if entry is None else entry)
    return Prompt(number, source, "x", "q", np.zeros(1, np.int32), answer, row)


@pytest.fixture(scope="module")
def places():
    """What a text may name: a folder that must stay empty, a file that must stay secret and whole,
    a port, this process. Every user may enter, read and write: only the guards stand before them
    (pytest's own temporary folder is its user's alone).
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
    """A scorer of every data set that evaluates, of math-verify and of one that compares."""
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


def matches(score, expected):
    return (
        score == Score(expected, True)
        if isinstance(expected, float)
        else score.outcome == expected and not score.known
    )


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
    assert "4711" not in " ".join(programs())
    assert "corpus_verifiers" not in sys.modules and scorer._thread.is_alive()


def programs():
    """Command lines of all processes."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline") as file:
                yield file.read()
        except OSError:
            continue


def test_the_corpus_is_large():
    assert len(ANSWERS) + len(VERIFIERS) >= 60 and len(
        {row.name for row in ANSWERS + VERIFIERS}
    ) == len(ANSWERS) + len(VERIFIERS)


@guarded
@pytest.mark.parametrize("row", VERIFIERS, ids=lambda row: row.name)
def test_a_hostile_verifier_gets_what_it_must(row, verifiers, places):
    before = verifiers._workers[0].process.pid
    verifiers.submit("row", prompt(), row.text.format(**places))
    verifiers.submit("next", prompt(), "0.25")
    verifiers.submit("next but one", prompt(), "0.75")
    got = drain(verifiers)
    assert matches(got["row"], row.expected), got["row"]
    assert got["next"] == Score(0.25, True) and got["next but one"] == Score(0.75, True)
    assert_nothing_is_left(verifiers, places, before)


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: row.name)
def test_a_hostile_answer_gets_what_it_must(row, answers, places):
    scorer, entries = answers
    source = DATASETS.index(row.kind) if row.kind in DATASETS else len(DATASETS)
    before = scorer._workers[0].process.pid
    if row.kind == "math":
        tasks = [prompt(answer=row.reference.format(), source=source)] * 3
        right, wrong = row.reference.format(), "1234"
    else:
        tasks = [prompt(source=source, answer=entries[source]["answer"], entry=entries[source])] * 3
        right, wrong = entries[source]["answer"], "1"
    scorer.submit("row", tasks[0], row.text.format(**places))
    scorer.submit("right", tasks[1], right)
    scorer.submit("wrong", tasks[2], wrong)
    got = drain(scorer)
    assert matches(got["row"], row.expected), got["row"]
    assert got["right"] == Score(1.0, True) and got["wrong"] == Score(0.0, True)
    assert_nothing_is_left(scorer, places, before)


WITHOUT = [
    ((guards.LANDLOCK, guards.MOUNTS), "writes {out}/ran"),
    ((guards.LANDLOCK,), "reads {secret}"),
    ((guards.PROCESSES,), "has_a_parent"),
    ((guards.SECCOMP,), "opens_a_socket"),
    ((guards.SECCOMP, guards.NETWORK, guards.LANDLOCK), "connects {port}"),
]


@guarded
@pytest.mark.parametrize(("missing", "text"), WITHOUT, ids=lambda value: str(value))
def test_without_its_guard_a_row_gets_through(missing, text, tmp_path, places):
    left = tuple(name for name in guards.GUARDS if name not in missing)
    tmp_path.chmod(0o777)
    with Scorer(RewardConfig(timeout_s=20.0), DATA, guards=left) as scorer:
        scorer.submit(0, prompt(), text.format(**places | {"out": tmp_path}))
        assert drain(scorer)[0] == Score(1.0, True)
    assert os.listdir(tmp_path) == (["ran"] if text.startswith("writes") else [])


FEWER = [
    "leaves_a_program",
    "leaves_a_daemon",
    "kills_its_parent",
    "kills {me}",
    "kills_everybody",
    "forks_for_ever",
    "hangs_with_children",
]


@guarded
def test_without_namespaces_nobody_outlives_and_nobody_is_killed(places):
    """What a container leaves: Landlock and seccomp, as in one without the right to make
    namespaces.
    """
    with Scorer(
        RewardConfig(timeout_s=LIMIT_S),
        DATA,
        guards=(guards.LANDLOCK, guards.SECCOMP),
    ) as scorer:
        scorer.wait_ready()
        before = scorer._workers[0].process.pid
        for number, text in enumerate(FEWER[:5]):
            scorer.submit(number, prompt(), text.format(**places))
        scorer.submit("hangs", prompt(), FEWER[-1])
        scorer.submit("next", prompt(), "0.25")
        got = drain(scorer)
        assert [got[n].reward for n in (0, 1)] == [0.5, 0.5] and [
            got[n].outcome for n in (2, 3, 4, "hangs")
        ] == ["error"] * 3 + ["timeout"]
        assert got["next"] == Score(0.25, True)
        assert_nothing_is_left(scorer, places, before)


def test_off_means_no_guards_and_still_a_child_for_each_answer(places):
    with Scorer(RewardConfig(timeout_s=LIMIT_S, sandbox="off"), DATA) as scorer:
        scorer.wait_ready()
        before = scorer._workers[0].process.pid
        texts = ["patches_itself", "0.25", "opens_a_socket", "leaves_a_daemon", "exits 0", "0.75"]
        for number, text in enumerate(texts):
            scorer.submit(number, prompt(), text)
        got = drain(scorer)
        assert [got[n].reward if got[n].known else got[n].outcome for n in range(6)] == [
            0.5,
            0.25,
            1.0,
            0.5,
            "crash",
            0.75,
        ]
        assert_nothing_is_left(scorer, places, before)


def test_required_names_the_missing_guard_and_auto_says_it(monkeypatch):
    monkeypatch.setattr(
        detect, "missing_guards", lambda: {guards.LANDLOCK: "Function not implemented"}
    )
    with pytest.raises(
        ConfigError, match=r"rewards.sandbox = 'required'.*Landlock \(Function not implemented\)"
    ):
        Scorer(RewardConfig(sandbox="required"), DATA)
    assert guards.LANDLOCK not in detect.guards_for("auto") and detect.guards_for("off") == ()
    assert "missing: Landlock (Function not implemented)" in detect.notice(
        "auto"
    ) and "this user's files" in detect.notice("off")


def test_the_dispatching_thread_restarts_and_loses_nothing(monkeypatch, caplog):
    """Three times, at three places: handing out, while answers are on the way, and while one is
    taken.
    """
    with Scorer(RewardConfig(workers=2, timeout_s=20.0), DATA) as scorer:
        scorer.wait_ready()
        for name in ("_hand_out", "_wait", "_receive"):
            whole, failed = getattr(Scorer, name), threading.Event()

            def fails_once(self, *arguments, whole=whole, failed=failed, name=name):
                if (
                    self.outstanding
                    and (name == "_hand_out" or any(w.held for w in self._workers))
                    and not failed.is_set()
                ):
                    if name == "_hand_out":
                        whole(self)
                    failed.set()
                    raise ZeroDivisionError(name)
                return whole(self, *arguments)

            with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
                patch.setattr(Scorer, name, fails_once)
                for number in range(50):
                    scorer.submit(number, prompt(), str(number))
                assert drain(scorer) == {number: Score(float(number), True) for number in range(50)}
            assert failed.is_set() and name in caplog.text


def test_a_worker_that_is_killed_before_it_is_ready_is_replaced():
    with Scorer(RewardConfig(timeout_s=20.0), DATA) as scorer:
        scorer._workers[0].process.kill()
        scorer.submit(0, prompt(), "0.5")
        assert drain(scorer) == {0: Score(0.5, True)}


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e9])
def test_a_time_limit_that_is_none_is_refused(seconds):
    with pytest.raises(ConfigError, match=r"rewards.timeout_s = "):
        RewardConfig(timeout_s=seconds).validate()


def test_closing_in_the_middle_of_a_hang_leaves_nobody(places):
    with Scorer(RewardConfig(timeout_s=600), DATA) as scorer:
        scorer.submit(0, prompt(), "hangs_with_children")
        worker = scorer._workers[0].process.pid
        assert wait_until(lambda: len(descendants(worker)) >= 7)
        start = time.monotonic()
    assert time.monotonic() - start < 10 and "4711" not in " ".join(programs())
