"""Reinforcement learning for mixture-of-experts language models on TPUs (system of arXiv
2512.07710).

    import compass_jax
    compass_jax.train("path/to/model", "prompts.jsonl", reward=my_function)

Everything heavy is imported by the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
) -> dict[str, Any]:
    """Trains a model by reinforcement learning, as `compass train --model ... --data ...` does.
    Returns the last step's metrics and the evaluation. The same call resumes its run.

    Args:
        model: a Hugging Face folder or a run directory, with its tokenizer.
        data: files of prompts (docs/data.md), folders of them, or tasks, "my_tasks.py:task".
        reward: the verifier: a function of a module or file, its name, or the weights of
            several. It runs in separate processes, which import its file again: a script has to
            start the training under `if __name__ == "__main__":`.
        evaluation: a file of prompts to evaluate on; empty: a part of `data` is held out.
        method: "screened", "espo", "gspo", "grpo" or "dapo".
        run_dir: where the run writes; empty: runs/MODEL-DATA/rl.
        settings: by their names on the command line, {"rl.steps": 20}.

    Raises UserError where something given cannot be used.
    """
    from compass_jax.library import train as run

    files = [data] if isinstance(data, str) else list(data)
    return run(model, files, reward, evaluation, method, run_dir, settings or {})
