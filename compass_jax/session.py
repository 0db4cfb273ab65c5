"""What SFT and RL runs share: the run directory, a stop signal, the tokenizer checked against the
model, errors that end a run.

And what of it several processes do together: process 0 writes, scores and requests to stop are
everyone's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from compass_jax import distributed
from compass_jax.config import (
    ConfigError,
    EngineJudgeConfig,
    JudgeConfig,
    RunConfig,
    ScalarJudgeConfig,
)
from compass_jax.config.io import flatten
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.errors import STRICT, CompassError
from compass_jax.rewards.asking import Batched, Pooled
from compass_jax.rewards.checks import checks_of, judged_sources
from compass_jax.rewards.fingerprint import changed, code_of
from compass_jax.rewards.joined import AnyJudge, AnyScorer, JoinedScorer, SharedScorer
from compass_jax.rewards.judging import Judge, Verdicts
from compass_jax.rewards.scalar import ScalarJudge
from compass_jax.rewards.score import Scorer
from compass_jax.runs.rundir import RunDir
from compass_jax.tpu_versions import check_versions
from compass_jax.trackers.opened import check_trackers
from compass_jax.weights import checkpoint
from compass_jax.weights.carried import carry_files


class RunRefused(CompassError, RuntimeError):
    """Process 0 could not open the run directory; the message is its error's."""


STOPPING = (
    "\n{}: the run saves what it has and ends as soon as it can. A second signal ends it"
    "\nat once; what came after the last checkpoint is then done again.\n"
)


class StopSignal:
    """Turns SIGTERM and SIGINT (Ctrl-C) into a flag that the loop reads where it can save and
    leave. A second one ends the process at once.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self._asked = False
        self._agreed = False
        self._before: dict[int, Any] = {}
        self.status = 128 + signal.SIGTERM  # the exit status of a run that stopped on request

    @property
    def requested(self) -> bool:
        """Whether to stop. Of several processes one request is enough, and all must look at the
        same places: they ask each other.
        """
        self._agreed = self._agreed or distributed.anyone(self._asked)
        return self._agreed

    @requested.setter
    def requested(self, value: bool) -> None:
        """Asks for a stop, as SIGTERM does."""
        self._asked = value

    def end(self, status: int) -> None:
        """Asks for a stop, after which the run's exit status is `status`."""
        self._asked = True
        self.status = status

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # no other may
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            before = self._before.get(number)
            if callable(before) and before is not signal.default_int_handler:
                before(number, frame)  # a command's: it does not return
            raise SystemExit(128 + number)
        self._asked = True
        self.status = 128 + number
        with contextlib.suppress(OSError):
            os.write(2, STOPPING.format(signal.Signals(number).name).encode())


def why_stopped(stop: StopSignal) -> str:
    """Who stopped a run, in words."""
    return "by --strict" if stop.status == STRICT else "on request"


@contextlib.contextmanager
def open_run(config: RunConfig) -> Iterator[RunDir]:
    """The run directory, opened for writing by process 0; what it refuses is raised in every
    process.

    A run that ends without an error has its directory still: RunDirectoryGone where it was removed
    meanwhile. ConfigError where another process has another configuration.
    """
    if jax.devices()[0].platform == "tpu" and config.model.moe_layers:
        check_versions(config.model.mixture.experts)
    known = with_code(config)
    distributed.same(flatten(known), "start the same command in every process")
    run, refusal = RunDir(config.directory, known), None
    if distributed.is_main_process():
        try:
            check_trackers(config.trackers)
            run.__enter__()
        except Exception as error:
            refusal = error
    told = distributed.exchange(str(refusal or "").encode())[0].decode()
    if told:
        raise refusal or RunRefused(told)
    try:
        yield run
        run.check()
    finally:
        run.__exit__()


def with_code(config: RunConfig) -> RunConfig:
    """`config` with the hashes of the files of own code, as a run's config.json has it."""
    return replace(config, rewards=replace(config.rewards, code=code_of(config.data)))


def code_changes(run: RunDir) -> list[str]:
    """What to tell of own verifiers whose files changed since the run was last started."""
    before = run.before.rewards.code if run.before else ()
    return [f"warning: {text}" for text in changed(before, run.config.rewards.code)]


def newest_checkpoint(directory: str, tell: Callable[[str], None]) -> checkpoint.Sound | None:
    """The newest sound checkpoint of a run directory that is open for writing, or None where it has
    none.

    Damaged ones after it are told of and renamed to `damaged_...`: the run will write those steps
    again. CheckpointError where all are damaged, ConfigError where the processes do not see the
    same ones.
    """
    newest = checkpoint.latest(directory)
    remedy = "a run directory must be on a file system that all processes share"
    distributed.same({f"the newest checkpoint in {directory}": newest}, remedy)
    if newest is None:
        return None
    found = checkpoint.find(directory, tell=tell)
    for kept in checkpoint.set_aside(found) if distributed.is_main_process() else ():
        tell(f"it is kept as {kept}: remove it when nobody needs it")
    return found


def open_scorer(config: RunConfig, directory: str | None = None) -> AnyScorer:
    """What judges the answers to the run's prompts; every command has it from here. With a run's
    `directory` the judge's verdicts are kept there.

    It starts before anything is written: a verifier that cannot be used is a VerifierError here,
    a judge that is not configured a ConfigError.
    """
    judge = _judge(config, directory)
    scorer = Scorer(config.rewards, config.data)
    if any(check.own for checks in checks_of(config.data) for check in checks):
        try:
            scorer.wait_ready()
        except BaseException:
            scorer.close()
            raise
    labelled = any(source.gold for _, source in config.data.keyed_sources())
    joined = labelled or judge is not None
    return shared(JoinedScorer(scorer, config.data, judge) if joined else scorer)


def _judge(config: RunConfig, directory: str | None) -> AnyJudge | None:
    judged = judged_sources(config.data)
    if not judged:
        return None
    judge = config.rewards.judge
    if judge is None:
        raise ConfigError(
            f"{config.data.keyed_sources()[min(judged)][0]} is judged by 'judge', and rewards.judge"
            " is None: name an endpoint and a model, JudgeConfig('http://127.0.0.1:8000/v1', ...)"
        )
    if not isinstance(judge, JudgeConfig) and jax.process_count() > 1:
        raise ConfigError(
            "rewards.judge: a judge that is not at an endpoint is for runs of one process; serve it"
            " (compass serve --openai) and name its endpoint in JudgeConfig"
        )
    if isinstance(judge, ScalarJudgeConfig):
        return ScalarJudge(judge.anchor_field)
    asker = Batched(judge) if isinstance(judge, EngineJudgeConfig) else Pooled(judge)
    return Judge(judge.anchor_field, asker, Verdicts(directory, jax.process_index()))


def shared(scorer: Scorer | JoinedScorer) -> AnyScorer:
    """`scorer`; of several processes each checks its share of the samples."""
    if jax.process_count() == 1:
        return scorer
    return SharedScorer(scorer, jax.process_index(), jax.process_count(), distributed.exchange)


def load_tokenizer(config: RunConfig) -> Tokenizer:
    """The run's tokenizer. ConfigError where none is named; TokenizerError where it has ids that
    the model lacks.
    """
    if not config.data.tokenizer:
        raise ConfigError(
            "data.tokenizer is empty: name a folder with tokenizer.json and tokenizer_config.json"
        )
    args = dict(config.data.template_args)
    return Tokenizer.for_model(config.data.tokenizer, config.model.vocab_size, args)


def carry_tokenizer(config: RunConfig) -> None:
    """Copies the tokenizer's files into the run directory, from where an export takes them; its
    folder may hold weights beside them.
    """
    if distributed.is_main_process():
        target = Path(config.directory) / "tokenizer"
        target.mkdir(exist_ok=True)
        carry_files(config.data.tokenizer, target)
