"""Reinforcement learning for mixture-of-experts language models on TPUs (system of arXiv
2512.07710).

    import compass_jax
    compass_jax.train("path/to/model", "prompts.jsonl", reward=my_function)

Everything heavy is imported by the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compass_jax.commands.library import Steps
    from compass_jax.commands.run import Run

__version__ = "0.2.0"


def train(
    model: str,
    data: str | Sequence[str],
    reward: str | Callable[..., Any] | Mapping[str, float] = "math",
    *,
    evaluation: str = "",
    method: str = "screened",
    run_dir: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """Trains a model by reinforcement learning, as `compass train --model ... --data ...` does.
    Returns the run, a mapping with the last step's metrics and the evaluation. The same call
    resumes its run.

    Args:
        model: a Hugging Face folder or a run directory, with its tokenizer.
        data: files of prompts (docs/data.md), folders of them, or tasks, "my_tasks.py:task".
        reward: the verifier: a function, its name ("my_rewards.py:score"), or the weights of
            several names. It runs in separate processes: they import its module, or for a function
            of a script or notebook a copy of its source in the run's directory.
        evaluation: a file of prompts to evaluate on; empty: a part of `data` is held out.
        method: "screened", "compass_max", "espo", "gspo", "grpo" or "dapo".
        run_dir: where the run writes; empty: runs/MODEL-DATA/rl.
        settings: by their names on the command line, {"rl.steps": 20}.

    Raises UserError where something given cannot be used.
    """
    from compass_jax.runs.signals import hide_slow_compile_notes

    hide_slow_compile_notes()
    from compass_jax.commands.library import train as run

    files = [data] if isinstance(data, str) else list(data)
    return run(model, files, reward, evaluation, method, run_dir, settings or {})


def steps(
    model: str,
    data: str | Sequence[str],
    reward: str | Callable[..., Any] | Mapping[str, float] = "math",
    *,
    evaluation: str = "",
    method: str = "screened",
    run_dir: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Steps:
    """Trains like `train`, and returns an iterator over the steps, each with `number` and
    `metrics`. Leaving the loop early saves a checkpoint; the same call continues there.

        for step in compass_jax.steps("path/to/model", "prompts.jsonl"):
            if step.metrics["reward/mean"] > 0.9:
                break

    The arguments and errors are those of `train`.
    """
    from compass_jax.runs.signals import hide_slow_compile_notes

    hide_slow_compile_notes()
    from compass_jax.commands.library import steps as begin

    files = [data] if isinstance(data, str) else list(data)
    return begin(model, files, reward, evaluation, method, run_dir, settings or {})


def __getattr__(name: str) -> Any:
    """Imports `Run` when it is first used."""
    if name != "Run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from compass_jax.commands.run import Run

    return Run
