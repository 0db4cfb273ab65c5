"""The table of `compass`'s commands: their options, functions and descriptions."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any, NamedTuple

from compass_jax.errors import STRICT, CompassError, UserError
from compass_jax.runs.signals import STATUSES


class Command(NamedTuple):
    """A command: its class in `options.py`, its function in a module of this package, and its line
    in `compass --help`.

    prints: whether its only result is its output. The function takes the options (and the
    configuration, if the class is Configured) and returns the exit status.
    """

    options: str
    function: str
    about: str
    prints: bool = False

    def options_class(self) -> Any:
        """Returns the dataclass of the command's options."""
        return getattr(import_module(f"{__package__}.options"), self.options)

    def run(self, *args: Any) -> int:
        """Imports the command's module, calls its function and returns the exit status."""
        module, name = self.function.split(":")
        return getattr(import_module(f"{__package__}.{module}"), name)(*args)


COMMANDS = {
    "training": {
        "demo": Command(
            "Demo", "work:demo", "run SFT, RL, evaluation and export on a small model, offline"
        ),
        "sft": Command("Sft", "work:sft", "train by supervised fine-tuning; resumes a run"),
        "train": Command("Train", "work:train", "train by reinforcement learning; resumes a run"),
        "train-judge": Command(
            "TrainJudge", "work:train_judge", "train a judge on preferences by SFT, then RL"
        ),
        "pipeline": Command(
            "Pipeline", "pipeline:run", "run stages (SFT, merge, RL, evaluation, export); resumes"
        ),
    },
    "data and rewards": {
        "data": Command(
            "Data",
            "work:data",
            "show prompts as the model sees them, and check their rewards",
            True,
        ),
        "filter": Command(
            "Filter", "work:filter_prompts", "estimate pass rates and select prompts for RL"
        ),
        "prepare-sft": Command(
            "PrepareSft", "prepare_sft:run", "remove duplicates and bad answers from conversations"
        ),
        "distil": Command(
            "Distil", "distil:run", "sample a teacher's answers and keep the correct ones for SFT"
        ),
        "tasks": Command(
            "Tasks", "catalogue:run", "list verifiers, tasks and data sets with examples", True
        ),
        "try": Command("Try", "trial:run", "score one answer as a run would, and say why", True),
    },
    "evaluation": {
        "eval": Command("Eval", "work:evaluate", "evaluate a checkpoint on held-out prompts"),
        "compare": Command(
            "Compare", "compare:run", "compare two evaluations prompt by prompt", True
        ),
        "eval-judge": Command(
            "EvalJudge", "eval_judge:run", "measure a judge's agreement with human preferences"
        ),
        "show": Command(
            "Show", "work:show", "show samples of a run: prompts, answers, rewards", True
        ),
        "report": Command(
            "Report", "work:report", "write a page of runs: curves, waste, samples, tokens", True
        ),
    },
    "models": {
        "import-hf": Command(
            "ImportHf", "work:import_hf", "convert a Hugging Face folder into a checkpoint"
        ),
        "import-gguf": Command(
            "ImportGguf", "work:import_gguf", "convert a GGUF file into a Hugging Face folder"
        ),
        "export-hf": Command(
            "ExportHf", "work:export_hf", "convert a checkpoint into a Hugging Face folder"
        ),
        "merge-lora": Command(
            "MergeLora", "work:merge_lora", "add LoRA adapters to the model they belong to"
        ),
        "upcycle": Command(
            "Upcycle", "work:upcycle", "make a mixture of experts from a dense model"
        ),
        "merge": Command("Merge", "merge:run", "merge models that were trained from one base"),
        "check": Command(
            "Check", "work:check", "find every fault of a run, checkpoint or model folder", True
        ),
        "serve": Command(
            "Serve", "work:serve", "serve a model by OpenAI's HTTP API or JetStream's gRPC API"
        ),
    },
    "configuration": {
        "init": Command(
            "Init", "work:init", "write a commented configuration for a model and data"
        ),
        "plan": Command(
            "Plan", "work:plan", "compile a step for absent TPUs: memory, collectives, fixes", True
        ),
        "calibrate-alpha": Command(
            "CalibrateAlpha", "work:calibrate_alpha", "measure ESPO's clip fraction against alpha"
        ),
    },
}
BY_NAME = {name: command for group in COMMANDS.values() for name, command in group.items()}
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
    for group, commands in COMMANDS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {name:<16} {command.about}" for name, command in commands.items()]
    return "\n".join([*lines, "", exit_statuses()])


def unknown_command(name: str) -> str:
    """Returns the error message for an unknown command, with the nearest name."""
    nearest = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else "compass --help lists them"
    return f"compass: no such command {name!r:.60}; {hint}"
