"""Ahead-of-time compilation during the first rollout, of the programs that the training calls."""

import logging
import re
import threading
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import pytest
from evolve import evolve
from tiny_run import tiny_run

from compass_jax.base.programs import Program, Result, struct
from compass_jax.config import MeshConfig, ZeroVarianceConfig
from compass_jax.training import building, loop, rl, step
from compass_jax.training.ahead import CompileAhead, compile_first
from compass_jax.training.rl import rl_steps, run_rl


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
    monkeypatch.setattr(rl, "every_program", lambda learner: [Program("wrong", wrong, (X,))])
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
        run_rl(evolve(config, model={"layers": 1}, rl={"micro_batch_tokens": 56}))
    assert "a gradient of rows of 56 tokens failed" in failed.value.__notes__[0]
    folder = tmp_path / "run"
    assert not (folder / "evaluation_start").exists()
    assert not (folder / "rollouts.jsonl").exists()
    assert not list(folder.glob("checkpoints/step_*"))


@pytest.mark.slow
def test_no_program_is_compiled_after_the_first_step(tmp_path, lowered, monkeypatch):
    """20 steps of answers of random lengths, with evaluations and checkpoints. The empty gradients
    before them run the listed programs, and change nothing.
    """
    engine_for, ends = building.engine_for, tuple(range(40))  # a tenth of all tokens ends an answer
    run_empty, unlisted = rl.run_empty, []

    def engine(drafts, model, compute, rollout, _, *rest, **find):
        return engine_for(drafts, model, compute, rollout, ends, *rest, **find)

    def counted(learner, arrays):
        listed, before = lowered.copy(), jax.device_get(learner.state)
        run_empty(learner, arrays)
        unlisted.extend(name for name, _ in lowered - listed)
        chex.assert_trees_all_equal(before, jax.device_get(learner.state))

    monkeypatch.setattr(rl, "run_empty", counted)
    monkeypatch.setattr(building, "engine_for", engine)
    monkeypatch.setattr(rl, "process_index_and_count", lambda: (0, 2))
    lengths = {"buckets": (44, 56), "micro_batch_tokens": 2 * 56, "zero_variance": RAW}
    config = evolve(tiny_run(), run_dir=str(tmp_path), rl=lengths, trackers=())
    # Checkpoints are stacked: layers that are not are stacked by a program at the first.
    config = evolve(config, model={"layers": 1}, compute={"scan_layers": True})
    config = evolve(config, rl={"steps": 20, "save_every": 5, "eval_every": 5})
    counts, padding = [], set()
    for done in rl_steps(evolve(config, evaluation={"start": True})):
        counts.append(sum(lowered.values()))
        padding.add(done.metrics["padding_frac"])
    large = {"prepare", "forward_and_pullback", "_objective_gradient", "pull", "accumulate"}
    assert "empty" in unlisted and not large & set(unlisted)
    assert len(counts) == 20 and len(padding) > 10
    assert counts[1:] == counts[:-1]


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
