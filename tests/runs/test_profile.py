"""The profiler trace of some steps: its steps, read from the file that JAX writes."""

from operator import itemgetter

import jax
import jax.numpy as jnp
import pytest

from compass_jax.config import ConfigError
from compass_jax.runs.profile import check_steps, traced


def steps(done, end):
    double = jax.jit(lambda x: 2 * x)
    for number in range(done + 1, end + 1):
        with jax.profiler.TraceAnnotation(f"work_of_step_{number}_"):
            double(jnp.ones(4)).block_until_ready()
        yield number, {"loss": float(number)}


@pytest.mark.parametrize(
    ("done", "end", "profiled", "inside"),
    [
        (0, 4, (2, 3), {2, 3}),
        (0, 2, (2, 5), {2}),  # the run ends before
        (2, 5, (2, 4), {3, 4}),  # it was resumed within them
        (4, 6, (2, 4), set()),
        (0, 3, (), set()),
    ],
)
def test_the_trace_has_the_wanted_steps(tmp_path, done, end, profiled, inside):
    notes = []
    results = list(
        traced(steps(done, end), itemgetter(0), done, profiled, str(tmp_path), notes.append)
    )
    assert results == [(i, {"loss": float(i)}) for i in range(done + 1, end + 1)]
    traces = b"".join(file.read_bytes() for file in tmp_path.rglob("*.xplane.pb"))
    seen = {i for i in range(1, 8) if f"work_of_step_{i}_".encode() in traces}
    assert seen == inside and len(notes) == bool(inside)
    assert all(f"up to {max(inside)}: {tmp_path / 'profile'}" in note for note in notes)


def test_a_loop_that_is_left_writes_what_it_has(tmp_path):
    loop = traced(steps(0, 9), itemgetter(0), 0, (2, 8), str(tmp_path), lambda text: None)
    for number, _ in loop:
        if number == 3:
            break
    loop.close()
    (file,) = tmp_path.rglob("*.xplane.pb")
    assert b"work_of_step_3_" in file.read_bytes()


@pytest.mark.parametrize("profiled", [(3,), (0, 1), (4, 3), (1, 2, 3)])
def test_two_numbers_from_one_are_needed(profiled):
    with pytest.raises(ConfigError, match=f"--profile-steps {' '.join(map(str, profiled))}: two"):
        check_steps(profiled)
    check_steps(())
    check_steps((3, 3))
