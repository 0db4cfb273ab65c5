"""The table of `compass`'s commands: their options, functions and descriptions."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any, NamedTuple

from compass_jax.base.errors import STRICT, CompassError, UserError
from compass_jax.runs.signals import STATUSES


class Command(NamedTuple):
    """A command: its name and its line in `compass --help`.

    Its options are the class of the same name in options.py ("train-judge": TrainJudge). Its
    function takes the options (and the configuration, if the class is Configured) and returns the
    exit status, or None for success.
    """

    name: str
    about: str

    def options_class(self) -> Any:
        """Returns the dataclass of the command's options."""
        cls = "".join(word.title() for word in self.name.split("-"))
        return getattr(import_module(f"{__package__}.options"), cls)

    def run(self, *args: Any) -> int:
        """Imports the command's module, calls its function and returns the exit status."""
        module, name = FUNCTIONS.get(self.name, ("work", self.name.replace("-", "_")))
        return getattr(import_module(f"{__package__}.{module}"), name)(*args) or 0


# command -> (module, function), if it is not the function of its name in work.py
FUNCTIONS = {
    "eval": ("work", "evaluate"),
    "eval-judge": ("eval_judge", "run"),
    "filter": ("work", "filter_prompts"),
    "merge": ("merge", "run"),
    "tasks": ("catalogue", "run"),
    "try": ("trial", "run"),
}
GROUPS = {
    "training": {
        "demo": "run SFT, RL, evaluation and export on a small model, offline",
        "sft": "train by supervised fine-tuning; resumes a run",
        "train": "train by reinforcement learning; resumes a run",
        "train-judge": "train a judge on preferences by SFT, then RL",
        "sample": "generate on another host for a run with samplers",
        "pipeline": "run stages (SFT, merge, RL, evaluation, export); resumes",
    },
    "data and rewards": {
        "data": "show prompts as the model sees them, and check their rewards",
        "filter": "estimate pass rates and select prompts for RL",
        "prepare-sft": "remove duplicates and bad answers from conversations",
        "distil": "sample a teacher's answers and keep the correct ones for SFT",
        "tasks": "list verifiers, tasks and data sets with examples",
        "try": "score one answer as a run would, and say why",
    },
    "evaluation": {
        "eval": "evaluate a checkpoint on held-out prompts",
        "compare": "compare two evaluations prompt by prompt",
        "eval-judge": "measure a judge's agreement with human preferences",
        "show": "show samples of a run: prompts, answers, rewards",
        "report": "write a page of runs: curves, waste, samples, tokens",
    },
    "models": {
        "import-hf": "convert a Hugging Face folder into a checkpoint",
        "import-gguf": "convert a GGUF file into a Hugging Face folder",
        "export-hf": "convert a checkpoint into a Hugging Face folder",
        "merge-lora": "add LoRA adapters to the model they belong to",
        "upcycle": "make a mixture of experts from a dense model",
        "merge": "merge models that were trained from one base",
        "check": "find every fault of a run, checkpoint or model folder",
        "serve": "serve a model by OpenAI's HTTP API or JetStream's gRPC API",
    },
    "configuration": {
        "init": "write a commented configuration for a model and data",
        "plan": "compile a step for absent TPUs: memory, collectives, fixes",
    },
}
BY_NAME = {name: Command(name, text) for group in GROUPS.values() for name, text in group.items()}
_STATUSES = {
    0: "success",
    CompassError.exit_status: "an error during the command, or a fault found by check or plan",
    UserError.exit_status: "unusable input: an option, a setting, a file",
    STRICT: "--strict: the rewards carry no information",
    STATUSES[0]: "ended by Ctrl-C (SIGINT); a training run saves its state first",
    STATUSES[1]: "ended by SIGTERM; a training run saves its state first",
}


def exit_statuses() -> str:
    """Returns the part of a help text that lists the exit statuses."""
    return "\n".join(["exit status:", *(f"  {n:<4} {text}" for n, text in _STATUSES.items())])


def overview() -> str:
    """Returns the text of `compass --help`."""
    lines = [
        "usage: compass COMMAND [options], compass COMMAND --help, compass version",
        "",
        "Reinforcement learning for mixture-of-experts language models, without wasted",
        "rollouts.",
    ]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {name:<16} {about}" for name, about in commands.items()]
    return "\n".join([*lines, "", exit_statuses()])


def unknown_command(name: str) -> str:
    """Returns the error message for an unknown command, with the nearest name."""
    nearest = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else "compass --help lists them"
    return f"compass: no such command {name!r:.60}; {hint}"
