"""The scorer of a run's prompts: verifiers, and a judge where a source names one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

from compass_jax.config import (
    ConfigError,
    DataConfig,
    EngineJudgeConfig,
    JudgeConfig,
    RewardConfig,
    ScalarJudgeConfig,
)
from compass_jax.data.chat_detection import with_chat_format
from compass_jax.devices import distributed
from compass_jax.rewards.checks import checks_of, judged_sources
from compass_jax.rewards.joined import AnyJudge, AnyScorer, JoinedScorer, SharedScorer
from compass_jax.rewards.judges.endpoint import Batched, Pooled
from compass_jax.rewards.judges.judging import Judge, Verdicts
from compass_jax.rewards.judges.scalar import ScalarJudge
from compass_jax.rewards.score import Scorer

Own = TypeVar("Own", Scorer, JoinedScorer)
Exchange = Callable[[bytes], list[bytes]]


def open_scorer(
    rewards: RewardConfig,
    data: DataConfig,
    directory: str | None = None,
    exchange: Exchange = distributed.all_gather_bytes,
) -> AnyScorer:
    """Opens the scorer of a run's prompts. With a run's `directory`, the judge's verdicts are
    stored there. With several processes, `exchange` gathers their scores.

    Call it before any file is written. Raises VerifierError for a verifier that cannot be used, and
    ConfigError if a source needs a judge and none is configured.
    """
    with_format = with_chat_format(data)
    judge = _judge(rewards, with_format, directory)
    scorer = Scorer(rewards, with_format)
    if any(check.is_users for checks in checks_of(data) for check in checks):
        try:
            scorer.wait_ready()
        except BaseException:
            scorer.close()
            raise
    labelled = any(source.gold for _, source in data.keyed_sources())
    if not labelled and judge is None:
        return shared(scorer, exchange)
    settings = rewards.gold_share, rewards.judge_needs_form
    if isinstance(rewards.judge, EngineJudgeConfig | ScalarJudgeConfig):
        # All processes run the judge's programs, on the same samples.
        return JoinedScorer(shared(scorer, exchange), data, judge, *settings)
    return shared(JoinedScorer(scorer, data, judge, *settings), exchange)


def _judge(rewards: RewardConfig, data: DataConfig, directory: str | None) -> AnyJudge | None:
    judged = judged_sources(data)
    if not judged:
        return None
    judge = rewards.judge
    if judge is None:
        raise ConfigError(
            f"{data.keyed_sources()[min(judged)][0]} is judged by 'judge', and rewards.judge"
            " is None: name an endpoint and a model, JudgeConfig('http://127.0.0.1:8000/v1', ...)"
        )
    if isinstance(judge, ScalarJudgeConfig):
        return ScalarJudge(judge.anchor_field, data.chat_format)
    if isinstance(judge, JudgeConfig):
        return Judge(
            judge.anchor_field,
            Pooled(judge),
            Verdicts(directory, str(jax.process_index() or "")),
            data.chat_format,
        )
    # every process knows every verdict
    verdicts = Verdicts(directory, "" if distributed.is_main_process() else None)
    distributed.require_equal_across_processes(
        {f"the judge's verdicts in {directory}": verdicts.digest}, distributed.SHARED_FOLDER
    )
    return Judge(judge.anchor_field, Batched(judge), verdicts, data.chat_format)


def shared(scorer: Own, exchange: Exchange = distributed.all_gather_bytes) -> Own | SharedScorer:
    """Returns `scorer`, or with several processes a SharedScorer of this one's share."""
    if jax.process_count() == 1:
        return scorer
    return SharedScorer(scorer, jax.process_index(), jax.process_count(), exchange)
