"""Ahead-of-time compilation during the first rollout, of the programs that the training calls."""

import logging
import re
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from evolve import evolve
from logged import numbers
from tiny_run import tiny_run

from compass_jax.base.programs import Program, Result, struct
from compass_jax.config import MeshConfig, ZeroVarianceConfig
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.training import loop, rl, step
from compass_jax.training.ahead import CompileAhead, compile_first
from compass_jax.training.learner import Learner
from compass_jax.training.rl import run_rl


@pytest.fixture
def lowered(monkeypatch):
    """Counts the programs that are lowered, by name and arguments."""
    counts = Counter()

    class Reader(logging.Handler):
        def emit(self, record):
            match = re.match(r"Compiling jit\((\w+)\) with global shapes (.*)", record.getMessage())
            if match:
                counts[match[1], match[2]] += 1

    logger, reader = logging.getLogger("jax._src.interpreters.pxla"), Reader()
    jax.clear_caches()
    logger.addHandler(reader)
    jax.config.update("jax_log_compiles", True)
    yield counts
    jax.config.update("jax_log_compiles", False)
    logger.removeHandler(reader)


@jax.jit
def doubled(x):
    return {"twice": x * 2}


@jax.jit
def total(inputs):
    return inputs["twice"].sum()


@jax.jit
def wrong(x):
    raise ValueError("this cannot be traced")


RAW = ZeroVarianceConfig(rl_zvp=False)
X = struct((5,), jnp.float32)


def test_a_call_finds_what_was_compiled(lowered):
    first = Program("first", doubled, (X,))
    compiler = CompileAhead([first, Program("second", total, (Result(first),))])
    compiler._thread.join()
    assert compiler.compiled == ["first", "second"]
    before = lowered.copy()
    assert {name for name, _ in before} == {"doubled", "total"}
    assert float(total(doubled(jnp.arange(5, dtype=jnp.float32)))) == 20
    assert not {"doubled", "total"} & {name for name, _ in lowered - before}


def test_what_cannot_be_compiled_is_left_to_its_call():
    compiler = CompileAhead([Program("wrong", wrong, (X,)), Program("first", doubled, (X,))])
    compiler.finish()
    assert compiler.compiled == []
    with pytest.raises(ValueError, match="cannot be traced"):
        wrong(jnp.zeros(5))


def test_after_finish_nothing_more_is_compiled():
    second_requested, go = threading.Event(), threading.Event()

    def programs():
        yield Program("first", doubled, (X,))
        second_requested.set()
        go.wait()
        yield Program("second", doubled, (struct((6,), jnp.float32),))

    compiler = CompileAhead(programs())
    second_requested.wait()
    compiler._enough.set()
    go.set()
    compiler.finish()
    assert compiler.compiled == ["first"]


def test_what_is_compiled_first_raises_where_it_does_not_compile(lowered):
    seen = []
    programs = [Program("first", doubled, (X,)), Program("wrong", wrong, (X,))]
    with pytest.raises(ValueError, match="cannot be traced"):
        compile_first(programs, seen.append)
    assert seen == [1] and {name for name, _ in lowered} == {"doubled"}


def test_a_run_of_several_processes_ends_before_its_first_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr(rl, "process_index_and_count", lambda: (0, 2))
    monkeypatch.setattr(Learner, "programs", lambda self: [Program("wrong", wrong, (X,))])
    config = evolve(tiny_run(), run_dir=str(tmp_path / "run"), evaluation={"start": True})
    with pytest.raises(ValueError, match="cannot be traced"):
        run_rl(config)
    folder = tmp_path / "run"
    assert not (folder / "evaluation_start").exists()
    assert not (folder / "rollouts.jsonl").exists()
    assert not list(folder.glob("checkpoints/step_*"))


class Unrunnable:
    """A program that compiles, and for which there is no memory when it runs."""

    lower = step.pull.lower

    def __call__(self, *_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_a_gradient_that_does_not_run_ends_the_run_before_its_first_rollout(tmp_path, monkeypatch):
    """It names the bucket and the reason."""
    monkeypatch.setattr(rl, "process_index_and_count", lambda: (0, 2))
    config = evolve(tiny_run(), run_dir=str(tmp_path / "run"), evaluation={"start": True})
    monkeypatch.setattr(step, "pull", Unrunnable())
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory") as failed:
        run_rl(evolve(config, model={"layers": 1}))
    assert "a gradient of rows of 56 tokens failed" in failed.value.__notes__[0]
    folder = tmp_path / "run"
    assert not (folder / "evaluation_start").exists()
    assert not (folder / "rollouts.jsonl").exists()
    assert not list(folder.glob("checkpoints/step_*"))


def test_empty_gradients_run_the_listed_programs_and_change_nothing(tmp_path, lowered, monkeypatch):
    config = evolve(tiny_run(), model={"layers": 1}, rl={"steps": 1, "buckets": (32, 56)})
    config = evolve(config, rl={"objective": Grpo(kl_coef=0.1), "zero_variance": RAW})
    run_empty, unlisted = rl.run_empty, []

    def counted(*arguments):
        listed = lowered.copy()
        run_empty(*arguments)
        unlisted.extend(name for name, _ in lowered - listed)

    monkeypatch.setattr(rl, "run_empty", counted)
    run_rl(evolve(config, run_dir=str(tmp_path / "one")))
    monkeypatch.setattr(rl, "process_index_and_count", lambda: (0, 2))
    run_rl(evolve(config, run_dir=str(tmp_path / "two")))
    large = {"prepare", "forward_and_pullback", "_objective_gradient", "pull", "accumulate"}
    assert "empty" in unlisted and not large & set(unlisted)
    assert numbers(tmp_path / "one") == numbers(tmp_path / "two")


@pytest.mark.slow
def test_a_run_over_a_mesh_compiles_each_program_once(tmp_path, lowered, monkeypatch):
    """The listed programs have the shapes and the arguments of the run; otherwise a program would
    be compiled twice. tests/apps/plan/test_programs.py checks this on one device.
    """
    seen = []

    class Patient(CompileAhead):
        def finish(self):
            self._thread.join()
            seen.append(self.compiled)

    monkeypatch.setattr(loop, "CompileAhead", Patient)
    config = tiny_run()
    config = evolve(
        config,
        run_dir=str(tmp_path),
        mesh=MeshConfig(fsdp=4, expert=2),
        rl={"steps": 2, "buckets": (56,)},
    )
    run_rl(config)
    assert {"prepare", "forward 56", "objective 56", "backward 56", "apply"} <= set(seen[0])
    large = {"prepare", "forward_and_pullback", "_objective_gradient", "pull", "apply"}
    counts = {key: n for key, n in lowered.items() if key[0] in large}
    assert {name for name, _ in counts} == large
    assert set(counts.values()) == {1}
