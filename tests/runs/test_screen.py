"""The screen: it shows life from the first second, fits its width, and does not count compilation
as work."""

import io
import os
import pty
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from compass_jax.runs.compiler_clock import COMPILER, CompilerClock
from compass_jax.runs.screen import Screen, sample_lines


class Clock:
    """A clock that the test sets, in seconds."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


# Independent of the terminal in which the tests run.
TERMINAL = {"force_terminal": True, "color_system": None, "_environ": {"TERM": "xterm"}}


def plain(width=80):
    return Console(file=io.StringIO(), width=width)


def output_lines(console):
    return console.file.getvalue().splitlines()


def test_the_time_left_counts_no_compilation(clock):
    compiler = CompilerClock(clock)
    screen = Screen(plain(), "rl", 11, 1e9, compiler, clock)
    screen.begin(0)
    compiler(CompilerClock.LOWERED, 0.1)
    clock.now = 300
    compiler(CompilerClock.COMPILED, 300)
    clock.now = 302
    screen.step(1, {"reward/mean": 0.5})
    assert screen.left_s == pytest.approx(2 * 10)


def test_what_another_thread_compiles_counts_while_it_is_waited_for(clock):
    compiler = CompilerClock(clock)

    def compiles():
        compiler(CompilerClock.LOWERED, 0.1)
        compiler(CompilerClock.COMPILED, 50)

    thread = threading.Thread(target=compiles)
    thread.start()
    thread.join()
    assert compiler.seconds == 0 and compiler.programs == 0
    with compiler.waiting():
        clock.now = 7
        assert compiler.busy_s == 7
    clock.now = 10
    assert compiler.seconds == 7 and compiler.busy_s == 0


def test_what_the_compiler_does_is_said_while_it_does_it(clock):
    compiler, console = CompilerClock(clock), plain()
    screen = Screen(console, "rl", 9, 10.0, compiler, clock)
    screen.begin(0)
    compiler(CompilerClock.LOWERED, 0.1)
    clock.now = 34
    assert compiler.busy_s == 34 and screen._doing() == "starts: compiling, 34 s"
    compiler(CompilerClock.COMPILED, 34)
    screen.phase("rollout", 23, 64)
    clock.now = 40
    assert screen._doing() == "rollout 23 of 64, 6 s"
    screen.close()


def test_jax_tells_of_every_compilation():
    before = COMPILER.programs, COMPILER.seconds
    jax.jit(lambda x: jnp.tanh(x) @ x.T)(jnp.ones((3, 5), jnp.float32)).block_until_ready()
    assert COMPILER.programs > before[0] and COMPILER.seconds > before[1] and not COMPILER.busy_s


def test_a_run_without_a_terminal_is_alive_before_its_first_step():
    console = plain()
    screen = Screen(console, "rl", 9, 0.2)
    screen.begin(3)
    screen.phase("rollout", 2, 8)
    deadline = time.monotonic() + 20
    while len(output_lines(console)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    screen.close()
    assert [line[:18] for line in output_lines(console)[:2]] == ["rl 3/9  rollout 2 "] * 2
    count = len(output_lines(console))
    time.sleep(0.8)
    assert len(output_lines(console)) == count  # closed


def test_between_steps_of_a_second_the_numbers_are_shown_and_not_the_phase():
    console = plain()
    screen = Screen(console, "sft", 1000, 0.3)
    screen.begin(0)
    screen.phase("training")
    for step in range(1, 60):
        screen.step(step, {"sft/loss": 1.0})
        time.sleep(0.03)
    screen.close()
    assert len(output_lines(console)) > 3 and all(
        "loss 1.000" in line for line in output_lines(console)
    )


def test_a_note_is_broken_between_words():
    console = Console(file=io.StringIO(), width=50, **TERMINAL)
    Screen(console, "rl", 9, 10.0).note("a setting of the run cannot act, " * 4 + "so change it")
    assert len(output_lines(console)) == 3 and all(
        len(line) <= 50 for line in output_lines(console)
    )
    assert all(line.startswith("  ") for line in output_lines(console)[1:])


def test_a_terminal_of_80_columns_gets_two_lines_that_fit(clock):
    console = Console(file=io.StringIO(), width=80, **TERMINAL)
    screen = Screen(console, "rl", 100, 10.0, CompilerClock(clock), clock)
    screen.begin(0)
    clock.now = 50
    signals = {"verifier": 0.44, "shaping": 0.1, "entropy": 0.3}
    metrics = {f"waste/frac_{name}_signal": share for name, share in signals.items()}
    metrics |= {"reward/mean": 0.512, "waste/frac_none": 0.16, "rollout/tokens_per_s": 12_345.0}
    screen.step(25, metrics)
    screen.close()
    text = console.file.getvalue()
    assert "rl 25/100 ━━━" in text and "2 min 30 s left" in text
    assert "verifier 44%" in text
    # Control characters take up to 20.
    assert max(len(line) for line in text.replace("\r", "\n").splitlines()) <= 80 + 20


def group(prompt, *samples):
    rows = [
        {"response": text, "reward": reward, "outcome": outcome, "tokens": 3, "truncated": cut}
        for text, reward, outcome, cut in samples
    ]
    return {"prompt": prompt, "samples": rows}


def test_the_best_the_worst_and_a_truncated_sample_are_shown_as_they_are():
    groups = [
        group("one?", ("right", 1.0, "ok", False), ("late", 5.0, "timeout", False)),
        group("two?", ("wrong", 0.0, "ok", False), ("a long\x1b[2J" + "x" * 500, 0.5, "ok", True)),
    ]
    lines = sample_lines(7, groups, 80)
    text = "\n".join(lines)
    assert "samples of step 7" in lines[0] and all(len(line) <= 80 for line in lines)
    assert "best: reward 1" in text and "worst: reward 0" in text
    assert "truncated: reward 0.5" in text and "late" not in text
    assert "\x1b" not in text and "\\x1b[2J" in text and text.endswith("…")
    assert sample_lines(7, [], 80) == []


def test_the_whole_question_and_the_reference_are_shown():
    question = "".join(f"Sentence {n} of the question.\n" for n in range(40))
    asked = group(question, ("right", 1.0, "ok", False), ("wrong", 0.0, "ok", False))
    lines = sample_lines(3, [{**asked, "answer": "1,234"}], 80)
    shown = "".join(line[11:] for line in lines if line.startswith(("  prompt", "         ")))
    assert shown == question.replace("\n", " ")
    assert lines.count("  truth    1,234") == 1, "once for both samples of the group"
    others = [asked, {**group("two?", ("late", -1.0, "ok", False)), "answer": "x" * 500}]
    lines = sample_lines(3, others, 80)
    assert sum(line.startswith("  prompt") for line in lines) == 2
    (truth,) = (i for i, line in enumerate(lines) if line.startswith("  truth"))
    assert lines[truth + 2].endswith("…") and lines[truth + 3].startswith("  answer")
    endless = sample_lines(3, [group("word " * 10**5, ("right", 1.0, "ok", False))], 80)
    assert len(endless) < 110 and endless[-2].endswith("…")


def test_a_sample_without_a_verdict_has_no_reward():
    lines = sample_lines(1, [group("one?", ("cut", 0.0, "error", True))], 80)
    assert lines[1] == "truncated: no verdict (error), 3 tokens"


def test_a_terminal_is_told_at_once_that_a_command_starts(tmp_path):
    """A terminal sees it before the slow imports; other outputs see nothing."""
    command = [sys.executable, "-m", "compass_jax", "train", "nowhere.py"]
    our_end, child_end = pty.openpty()
    with subprocess.Popen(
        command, stdout=child_end, stderr=subprocess.PIPE, cwd=tmp_path
    ) as process:
        os.close(child_end)
        with os.fdopen(our_end, "rb", buffering=0) as terminal:
            first = b""
            while not first.endswith(b"\n"):  # a line may come in parts
                first += terminal.read(1)
            assert first == b"compass train: starting\r\n"
        assert b"nowhere.py" in process.communicate()[1]
    completed = subprocess.run(command, capture_output=True, cwd=tmp_path)
    assert completed.stdout == b"" and completed.returncode == 2


def test_an_evaluation_counts_its_answers_and_no_step_takes_its_time(clock):
    compiler, console = CompilerClock(clock), plain()
    screen = Screen(console, "rl", 11, 10.0, compiler, clock)
    screen.begin(0)
    screen.phase("evaluation", 0, 40)
    compiler(CompilerClock.LOWERED, 0.1)
    clock.now = 60
    compiler(CompilerClock.COMPILED, 60)  # counted once, as the compiler's
    clock.now = 100
    screen.phase("evaluation", 10, 40)
    assert screen._doing() == "evaluation 10 of 40, 1 min 40 s, 5 min 00 s left"
    screen.phase("evaluation", 40, 40)
    clock.now = 400
    assert screen._doing() == "evaluation 40 of 40, 6 min 40 s"
    screen.phase("rollout", 0, 4)
    clock.now = 410
    screen.step(1, {"reward/mean": 0.5})
    assert screen.left_s == pytest.approx(100)
    screen.phase("evaluation", 0, 40)  # after a step, before its line
    clock.now = 500
    screen.step(2, {"reward/mean": 0.5})
    clock.now = 520
    screen.step(3, {"reward/mean": 0.5})
    assert screen.left_s == pytest.approx(30 / 3 * 8)
    screen.close()
