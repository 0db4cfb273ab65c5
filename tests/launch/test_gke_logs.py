"""launch/gke.py logs: a worker's output over every attempt, to the run's end."""

import pytest
from test_gke import gke

POD = "--selector=jobset.sigs.k8s.io/jobset-name=r1,batch.kubernetes.io/job-completion-index=7"
GET = [
    "kubectl",
    "get",
    "jobset",
    "r1",
    '--output=jsonpath={.status.conditions[?(@.status=="True")].type}',
]
WAIT = ["kubectl", "wait", "pod", POD, "--for=condition=Ready", "--timeout=10s"]
READ = ["kubectl", "logs", "--follow", "--tail=-1", "--container=compass", POD]


def followed(fakes) -> tuple[int, str, list[list[str]]]:
    """Runs `logs` of worker 7. Returns its status, its output, and its calls without their
    times.
    """
    done = gke(fakes, "logs", "--name", "r1", "--worker", "7")
    return (
        done.returncode,
        done.stdout + done.stderr,
        [[word.split("-time=")[0] for word in call] for call in fakes.calls()],
    )


@pytest.mark.parametrize("end,expected", [("StartupPolicyCompleted Completed", 0), ("Failed", 1)])
def test_logs_follow_attempt_after_attempt(fakes, end, expected):
    """The logs start right after apply, continue over a restart and end with the JobSet; no
    attempt's output appears twice.
    """
    fakes.answer("get jobset", "", "", "StartupPolicyCompleted", end)
    fakes.answer("wait", status=1, err="error: no matching resources found\n")
    fakes.answer("logs", "first\n", "second\n")
    status, printed, calls = followed(fakes)
    assert calls == [
        GET,
        WAIT,
        GET,
        WAIT,
        READ,
        GET,
        WAIT,
        [*READ, "--since"],
        GET,
        [*READ, "--since"],
    ]
    assert (
        status == expected
        and printed
        == "first\nsecond\nlaunch/gke.py: waiting for the worker's pod: error: no matching"
        " resources found\n"
    )


def test_logs_where_the_run_has_ended(fakes):
    fakes.answer("get jobset", "Completed")
    assert followed(fakes) == (0, "", [GET, READ])


def test_logs_where_the_connection_broke(fakes):
    """The whole output is read again; a cluster that no longer answers ends the command."""
    fakes.answer("get jobset", "", "")
    fakes.answer("get jobset", status=9, times=9)
    fakes.answer("logs", status=1)
    assert followed(fakes) == (9, "", [GET, WAIT, READ, GET, WAIT, READ, *[GET] * 5])


def test_dry_run_of_logs(fakes):
    done = gke(fakes, "logs", "--dry-run", "--name", "r1", "--worker", "7")
    fakes.run("bash", "-ec", done.stdout)
    assert fakes.calls() == [GET, WAIT, READ, GET]
