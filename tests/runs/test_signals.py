"""Ctrl-C and SIGTERM at any moment of a command: it ends with one line, the status of the signal
and no traceback."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOM = """
    import os, signal, sys, time, types
    from compass_jax.commands import cli

    def wait():
        # In short pieces: the system may hand a signal to a thread that starts at this moment, and
        # Python then calls the handler here only after the piece.
        for _ in range(600):
            time.sleep(0.1)

    def room(*args):
        {body}

    sys.modules["compass_jax.runs.report"] = types.SimpleNamespace(
        run_report=room, watch_report=room
    )
    sys.argv = ["compass", "report", "a"]
    sys.exit(cli.main())
"""


def run(code, folder, **options):
    """Runs a Python program in `folder`; returns the completed process."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    paths = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, **options
    )


SIGNALS = pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])


@SIGNALS
def test_a_signal_ends_a_command_that_has_nothing_to_save_with_one_line(tmp_path, name):
    completed = run(ROOM.format(body=f"os.kill(os.getpid(), signal.{name}); wait()"), tmp_path)
    assert completed.returncode == 128 + getattr(signal, name)
    assert completed.stderr == f"compass report: ended by {name}\n"


def test_a_signal_in_a_callback_that_swallows_what_is_raised_ends_the_command_all_the_same(
    tmp_path,
):
    body = """
        class Odd:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)

        print("printed")
        Odd()
        wait()
    """
    completed = run(ROOM.format(body=body), tmp_path)
    assert (completed.returncode, completed.stdout) == (130, "printed\n")
    assert completed.stderr == "compass report: ended by SIGINT\n"


def test_a_second_signal_ends_a_run_that_is_about_to_stop(tmp_path):
    body = """
        from compass_jax.training.session import RunState

        with RunState() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            print(stop.interrupted, stop.status)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                wait()
    """
    completed = run(ROOM.format(body=body), tmp_path)
    assert (completed.returncode, completed.stdout) == (143, "True 130\n")
    assert completed.stderr == (
        "\nSIGINT: the run saves what it has and ends as soon as it can. A second signal ends it\n"
        "at once; what came after the last checkpoint is then done again.\n"
        "compass report: ended by SIGTERM\n"
    )


def test_a_signal_while_the_command_is_loaded_is_one_line(tmp_path):
    code = """
        import os, runpy, signal, sys

        class Hook:
            def find_spec(self, name, *_):
                if name == "compass_jax.commands.cli":
                    os.kill(os.getpid(), signal.SIGINT)

        sys.meta_path.insert(0, Hook())
        sys.argv = ["compass", "report", "x"]
        runpy.run_module("compass_jax", run_name="__main__")
    """
    completed = run(code, tmp_path)
    assert (completed.returncode, completed.stdout) == (130, "")
    assert completed.stderr == "compass: ended by SIGINT\n"


def test_a_command_that_ends_waits_for_threads_calls_exit_functions_and_flushes(tmp_path):
    body = """
        import atexit, threading

        class Odd:
            def __del__(self):
                print("torn down")

        cli.kept = Odd()
        atexit.register(lambda: print("exit function"))
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    """
    completed = run(ROOM.format(body=body), tmp_path)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout == "thread\nexit function\n"


def test_output_that_cannot_be_written_is_an_error_at_the_end(tmp_path):
    completed = run(ROOM.format(body="sys.stdout = open('/dev/full', 'w'); print(1)"), tmp_path)
    assert completed.returncode == 120 and "No space left on device" in completed.stderr
