"""Compilation before its programs are called: of a run with several processes before anything else,
with a gradient of empty rows, so that what does not compile, fit or run costs no rollout; else
during the first rollout, so that the first step waits for neither.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from compass_jax.base.aliases import Tree
from compass_jax.base.programs import Program, struct
from compass_jax.base.records import StepArrays
from compass_jax.model.moe import empty_routes
from compass_jax.rl.bucketing import plan, row_counts
from compass_jax.rl.row_plan import UpdatePlan
from compass_jax.runs.compiler_clock import COMPILER
from compass_jax.training.learner import Learner
from compass_jax.training.programs import training_programs


class CompileAhead:
    """Compiles programs in order in a thread; later calls reuse the compiled programs.

    A program that does not compile only ends the thread: the call that needs it raises the error.
    Results are unchanged, since the same programs are compiled as in the calls.
    """

    def __init__(self, programs: Iterable[Program]):
        self.compiled: list[str] = []  # names of programs
        self._programs = programs
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compile-ahead")
        self._thread.start()

    def finish(self) -> None:
        """Waits for the program that is compiling; the remaining ones compile at their
        first call.
        """
        self._enough.set()
        with COMPILER.waiting():
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            programs = itertools.takewhile(lambda _: not self._enough.is_set(), self._programs)
            self.compiled.extend(_compiled(programs))


def every_program(learner: Learner) -> Iterator[Program]:
    """Returns the programs of `Learner.train` for every number of rows that a micro-batch may have,
    so that none is compiled between steps.
    """
    mesh = learner.model.placement is not None

    def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
        return struct(x.shape, x.dtype, x.sharding if mesh else None)

    state, params = jax.tree.map(abstract, (learner.state, learner.params))
    return training_programs(learner.config, learner.model, state, params)


def compile_first(programs: Iterable[Program], progress: Callable[[int], None]) -> None:
    """Compiles programs in order; `progress` gets the number of those that are compiled. Raises the
    error of one that does not compile or needs more memory than the devices have.
    """
    for number, _ in enumerate(_compiled(programs), 1):
        progress(number)


def _compiled(programs: Iterable[Program]) -> Iterator[str]:
    """Compiles programs; yields the name of each when it is compiled."""
    results: dict[Program, Tree] = {}
    for program in programs:
        with _named(f"program {program.name!r}"):
            lowered = program.lower(results)
            results[program] = lowered.out_info
            lowered.compile()
        yield program.name


def run_empty(learner: Learner, arrays: StepArrays) -> None:
    """Computes a gradient of two full micro-batches of each bucket, the longest first, with the
    learner's parameters, and drops it. Raises the error of a program that does not run or fit.

    Args:
        arrays: a step without samples, whose routes are made here.
    """
    updates, rows = learner.config.updates, learner.updates[0]
    arrays.routes = _no_routes(learner, len(arrays.lengths))
    placement, packed = learner.model.placement, updates.packed_row_tokens
    multiple = 1 if placement is None else placement.rows_multiple
    options = {"rows_multiple": multiple, "packed_row_tokens": packed}
    for length in [packed] if packed else reversed(updates.buckets):
        with _named(f"a gradient of rows of {length} tokens"):
            scored, longest = learner.score(arrays), min(length, updates.buckets[-1])
            count = 2 * row_counts(length, updates.micro_batch_tokens, multiple)[0]
            sizes = np.full(count * (length // longest), longest)
            micros = plan(sizes, updates.buckets, updates.micro_batch_tokens, **options)
            empty = [x._replace(rows=np.full_like(x.rows, -1)) for x in micros]
            scored.plan = scored.plan._replace(updates=[UpdatePlan(rows, empty, [])])
            prepared, _ = learner.prepare(scored, rows)
            jax.block_until_ready(learner.gradient(scored, rows, prepared))


def _no_routes(learner: Learner, rows: int) -> Tree:
    """Returns unset routes of a step where the learner keeps them; None without replay of them."""
    config, model = learner.config, learner.model
    if config.algorithm.replay != "R3" or not model.config.moe_layers:
        return None
    places = None if model.placement is None else model.placement.rows(rows)

    def empty() -> Tree:
        return empty_routes(model.config, rows, config.rollout.max_length)

    # Made by each device for its rows: those of a step may be more than one device holds.
    return jax.jit(empty, out_shardings=places)()


@contextlib.contextmanager
def _named(work: str) -> Iterator[None]:
    """Adds to an error what failed, and that no rollout was lost."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{work} failed before it was needed; no rollout was lost")
        raise
