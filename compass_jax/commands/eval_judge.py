"""`compass eval-judge`: measures a judge's agreement with human preferences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compass_jax.apps.pipeline.agreement import judged, own_judge
from compass_jax.commands.configured import keep_compiled
from compass_jax.commands.options import EvalJudge
from compass_jax.config import JudgeConfig
from compass_jax.config.errors import check
from compass_jax.config.ranges import check_fields
from compass_jax.data.files import DataError
from compass_jax.data.preferences import read_preferences
from compass_jax.rewards.judges.agreement import Agreement
from compass_jax.rewards.judges.endpoint import Pooled
from compass_jax.rewards.verifiers.judge import messages
from compass_jax.training.from_files import engine_config


def run(options: EvalJudge) -> None:
    """Measures the judge of `compass eval-judge`."""
    limit = options.max_tokens
    if options.endpoint:
        judge: JudgeConfig | str = JudgeConfig(
            options.endpoint,
            options.model,
            key_env=options.key_env,
            timeout_s=options.timeout_s,
            requests=options.requests,
            max_tokens=2048 if limit is None else limit,
        )
        check_fields(judge, "rewards.judge")
    else:
        check(limit is None or limit > 0, f"--max-tokens {limit}: must be at least 1")
        keep_compiled(options)
        judge = options.model
    run_eval_judge(options.data, judge, options.out, options.most, limit)


def run_eval_judge(
    files: Sequence[str],
    judge: JudgeConfig | str,
    out: str = "",
    most: int = 0,
    max_tokens: int | None = None,
) -> Agreement:
    """Asks the judge about the pairs of `files`, and prints and returns its agreement with them.

    Args:
        files: files of preferences (data/preferences.py).
        judge: an endpoint, or the folder of a model, which this process's engine runs.
        out: folder for SUMMARY and RULINGS (one line per pair); empty: no files.
        most: number of pairs, from the first; 0: all.
        max_tokens: maximum number of tokens of an answer of the engine; None: as many as the model
            and the memory allow.

    Raises DataError for unusable rows, and ConfigError for an unusable judge.
    """
    if isinstance(judge, JudgeConfig):
        judge.validate()
    pairs = [pair for name in files for pair in read_preferences(name)]
    pairs = pairs[:most] if most else pairs
    if out and Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise DataError(f"--out {out} is there already, and not empty; name another folder")
    if isinstance(judge, JudgeConfig):
        return judged(pairs, Pooled(judge), {"judge": judge.model, "endpoint": judge.endpoint}, out)
    questions = [messages(one.question, x, y) for one in pairs for x, y in (one[1:3], one[2:0:-1])]
    config = engine_config(judge, questions, max_tokens)
    asker = own_judge(config.policy, config.data, config.seed, judge)
    return judged(pairs, asker, {"judge": judge}, out)
