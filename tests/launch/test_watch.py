"""launch/tpu_vm.sh watch: when it resumes, when it ends, and with which status."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from process_state import wait_for
from test_tpu_vm import (
    ASK,
    ASK_NODE,
    ASK_QUEUE,
    DEQUEUE,
    ENQUEUE,
    FIXED,
    FOLLOW,
    GONE,
    NO_LOGIN,
    NODE,
    QUEUE,
    SLICE,
    SPOT,
    TRAIN,
    WHERE,
    resumed,
    ssh,
    tpu_vm,
)
from test_tpu_vm_workers import workers

__all__ = ["workers"]  # a fixture


def test_watch_lives_through_a_preemption(fakes):
    """The slice is created, preempted while its logs are followed, and created again; then the
    command succeeds.
    """
    fakes.answer(QUEUE, status=1, err=GONE)
    fakes.answer(NODE, status=1, err=GONE)
    fakes.answer(QUEUE, "ACTIVE\n")
    fakes.answer("worker.sh follow", status=255)
    fakes.answer(NODE, "PREEMPTED\n", times=2)
    fakes.answer(QUEUE, "SUSPENDED\n", "ACTIVE\n")
    done = fakes.vm("watch", *SPOT, *TRAIN)
    assert done.returncode == 0 and "lost it (status 255)" in done.stderr
    first = [ASK_QUEUE, ASK_NODE, ENQUEUE, ASK_QUEUE, *resumed(fakes), FOLLOW, ASK_NODE]
    assert fakes.calls() == [
        *first,
        ASK_QUEUE,
        ASK_NODE,
        DEQUEUE,
        ENQUEUE,
        ASK_QUEUE,
        *resumed(fakes),
        FOLLOW,
    ]


def test_watch_follows_again_where_only_the_connection_was_lost(fakes):
    fakes.answer(NODE, "READY\n", times=9)
    fakes.answer(
        "worker.sh status",
        "host: ended with status 1\n",
        "host: running\n",
        "host: running\n",
        "host: ended with status 5\n",
    )
    fakes.answer("worker.sh follow", status=255)
    fakes.answer("worker.sh follow", status=1)
    done = fakes.vm("watch", *FIXED, *TRAIN)
    assert done.returncode == 5
    last_calls = [ASK_NODE, ssh(ASK), FOLLOW, ASK_NODE, ssh(ASK), LAST]
    assert fakes.calls() == [
        ASK_NODE,
        *resumed(fakes),
        FOLLOW,
        ASK_NODE,
        ssh(ASK),
        *last_calls,
    ]


def test_watch_gives_up_where_nothing_works(fakes):
    fakes.answer(NODE, status=1, err=NO_LOGIN, times=99)
    assert fakes.vm("watch", *FIXED, *TRAIN).returncode == 1 and fakes.calls() == [ASK_NODE] * 5


def status_output(*statuses: str) -> str:
    """Returns the workers' output for a status call."""
    return "".join(
        f"host{number}: {status if status[0] in 'rkn' else 'ended with status ' + status}\n"
        for number, status in enumerate(statuses)
    )


def watched(fakes, *answers: str, followed: int = 75):
    """Runs a watch whose command ends with the status `followed` each time. The workers have no
    command before each start, and answer one of `answers` after it.
    """
    fakes.answer(NODE, "READY\n", times=99)
    for answer in answers:
        fakes.answer("worker.sh status", "host0: no command yet\n", answer)
        fakes.answer("worker.sh follow", status=followed)
    return fakes.vm("watch", *FIXED, *TRAIN)


AROUND = [ASK_NODE, ssh(ASK)]
LAST = ssh("compass/launch/worker.sh last")


@pytest.mark.parametrize(
    "answers,expected",
    [
        (("143, stopped", "143, stopped"), 143),
        (("75, stopped", "134, stopped"), 75),
        (("5", "134"), 5),
        (("75", "1", "143"), 1),
        (("134", "2", "running"), 2),  # worker 1's failure is the cause; worker 2 will notice it
        (("killed", "killed"), 137),
        (("0", "0"), 0),
    ],
)
def test_what_ends_it(fakes, answers, expected):
    assert watched(fakes, status_output(*answers)).returncode == expected
    last = [] if expected in (0, 143) else [LAST]
    assert fakes.calls() == [ASK_NODE, *resumed(fakes), FOLLOW, *AROUND, *last]


@pytest.mark.parametrize(
    "answers",
    [
        ("143", "143"),
        ("134", "143"),
        ("75", "134"),
        ("killed", "75"),
        ("no command yet", "75"),
        ("running",) * 2,
    ],
)
def test_what_it_resumes(fakes, answers):
    """A watch resumes after a preempted VM, a lost worker, a restarted VM or a lost connection."""
    assert watched(fakes, status_output(*answers)).returncode == 0  # the second attempt succeeds
    assert [call for call in fakes.calls() if call != LAST] == [
        *[ASK_NODE, *resumed(fakes), FOLLOW, *AROUND],
        ASK_NODE,
        *resumed(fakes),
        FOLLOW,
    ]


def test_it_waits_until_all_workers_answer(fakes):
    fakes.answer(NODE, "READY\n")
    fakes.answer("worker.sh status", "")
    fakes.answer(NODE, status=1, err="ERROR: no network", times=6)
    fakes.answer("worker.sh status", status_output("134"), status=255, times=6)
    fakes.answer("worker.sh status", status_output("134", "134"))
    fakes.answer("worker.sh follow", status=255)
    done = watched(fakes)
    assert (
        done.returncode == 0
        and done.stderr.count("not every worker answers; waiting until all do") == 1
    )
    assert fakes.calls() == [
        ASK_NODE,
        *resumed(fakes),
        FOLLOW,
        *[ASK_NODE] * 6,
        *AROUND * 7,
        LAST,
        ASK_NODE,
        *resumed(fakes),
        FOLLOW,
    ]


@pytest.mark.parametrize("last,looks", [(("75", "134"), 3), (("75", "running"), 5)])
def test_workers_that_still_run_are_given_a_while(fakes, last, looks):
    fakes.answer(NODE, "READY\n", times=99)
    fakes.answer("worker.sh follow", status=75)
    fakes.answer(
        "worker.sh status",
        "",
        *[status_output("75", "running")] * 2,
        *[status_output(*last)] * (looks - 2),
    )
    assert fakes.vm("watch", *FIXED, *TRAIN).returncode == 0
    assert fakes.calls() == [
        ASK_NODE,
        *resumed(fakes),
        FOLLOW,
        *AROUND * looks,
        LAST,
        ASK_NODE,
        *resumed(fakes),
        FOLLOW,
    ]


def test_resume_starts_all_again_where_some_run(fakes):
    fakes.answer(NODE, "READY\n")
    fakes.answer("worker.sh status", status_output("running", "134"))
    assert fakes.vm("resume", *FIXED, *TRAIN).returncode == 0 and fakes.calls() == [
        ASK_NODE,
        *resumed(fakes),
    ]


@pytest.mark.parametrize("status", [75, 134])
def test_a_command_that_keeps_losing_workers(fakes, status):
    done = watched(fakes, *[status_output(str(status))] * 9, followed=status)
    assert (
        done.returncode == status
        and "the fifth time in a row within 10 minutes of a start: giving up" in done.stderr
    )
    assert fakes.calls().count(FOLLOW) == 5


def test_losses_after_a_while_do_not_count(fakes):
    """A loss later than 10 minutes after a start resets the count: here four early losses, a late
    one, and five early ones.
    """
    fakes.add("date")
    fakes.answer("date", *["0", "599"] * 4, "0", "600", *["0", "599"] * 5)
    assert (
        watched(fakes, *[status_output("75")] * 12).returncode == 75
        and fakes.calls().count(FOLLOW) == 10
    )


DELETE = "delete --name r1 --zone us-east5-a --project p"


@pytest.mark.parametrize(
    "status,words,expected", [(0, FIXED, DELETE), (5, SPOT, f"{DELETE} --spot")]
)
def test_its_last_line_tells_how_to_delete(fakes, status, words, expected):
    fakes.answer(NODE, "READY\n", times=9)
    fakes.answer("worker.sh status", "", status_output(str(status)))
    fakes.answer("worker.sh follow", status=status)
    done = fakes.vm("watch", *words, *TRAIN)
    last = done.stderr.splitlines()[-1]
    assert (
        done.returncode == status
        and last
        == f"launch/tpu_vm.sh: what is left of the slice costs until it is deleted: {fakes.script}"
        f" {expected}"
    )


@pytest.mark.parametrize("status,delete,expected", [(0, 0, 0), (5, 0, 5), (5, 7, 5), (0, 7, 1)])
def test_delete_at_its_end(fakes, status, delete, expected):
    """A failed deletion is reported with the command to repeat; a failure of the training command
    decides the exit status.
    """
    fakes.answer(NODE, "READY\n", times=9)
    fakes.answer("worker.sh status", "", status_output(str(status)))
    fakes.answer("worker.sh follow", status=status)
    fakes.answer("tpu-vm delete", status=delete)
    done = fakes.vm("watch", *FIXED, "--delete", *TRAIN)
    assert done.returncode == expected and fakes.calls()[-1] == [
        "gcloud",
        "compute",
        "tpus",
        "tpu-vm",
        "delete",
        "r1",
        "--quiet",
        *WHERE,
    ]
    assert (DELETE in done.stderr) is bool(delete)


def test_dry_run_of_delete_at_its_end(fakes):
    done = fakes.vm("watch", *FIXED, "--delete", "--dry-run", *TRAIN)
    assert (
        done.returncode == 0
        and fakes.calls() == []
        and done.stdout.splitlines()[-1] == " ".join(tpu_vm("delete", "r1", "--quiet"))
    )


def test_a_stop_ends_it(workers):
    """A `stop` from elsewhere ends the watch on two workers: the command saves and exits with
    143.
    """
    workers.answer(NODE, "READY\n", times=9)
    log = workers.worker(1) / "compass-run" / "log"
    with ThreadPoolExecutor(1) as pool:
        watch = pool.submit(workers.vm, "watch", *FIXED, "--", "compass", "run", "0")
        wait_for(lambda: log.exists() and "auto" in log.read_text(), 30)
        assert workers.vm("stop", *SLICE).returncode == 0
        assert watch.result().returncode == 143 and "saved" in watch.result().stdout


def test_a_failure_shows_the_last_lines_of_all_workers(workers):
    """The log of the worker that is followed need not have the reason."""
    workers.answer(NODE, "READY\n", times=9)
    logs = [workers.worker(number) / "compass-run" / "log" for number in (0, 1)]
    with ThreadPoolExecutor(1) as pool:
        watch = pool.submit(workers.vm, "watch", *FIXED, "--", "compass", "run", "5")
        wait_for(lambda: all(x.exists() and "auto" in x.read_text() for x in logs), 30)
        for number, log in enumerate(logs):
            with log.open("a") as file:
                file.write("x\n" * 40 + f"what worker {number} said\n" + "y" * 400 + "\n")
        for number in (0, 1):
            (workers.worker(number) / "go").touch()
        done = watch.result()
    assert done.returncode == 5 and "the last lines of all workers" in done.stderr
    last = [x for x in done.stdout.splitlines() if x.startswith(f"{socket.gethostname()}: ")]
    said = [x for x in last if "what worker" in x]
    assert [x.partition(": ")[2] for x in said] == ["what worker 0 said", "what worker 1 said"]
    assert len(last) == 60 and max(len(x) for x in last) < 400
