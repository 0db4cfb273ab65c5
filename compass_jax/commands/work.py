"""The functions of commands that mostly call another part of the package.

Each takes the command's options, and its configuration if it has one, and returns the exit status.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from compass_jax.commands import options as commands
from compass_jax.commands.configured import config_from_options, keep_compiled
from compass_jax.config import ConfigError, RunConfig
from compass_jax.errors import STRICT
from compass_jax.runs.rundir import FolderLock, NewFolderLock

# 128 + SIGTERM: a run that stopped on request must not look finished to its parent process
STOPPED = 143
# The TPU's compiler runs on the CPU. It reads the machine from the environment, or from a cloud's
# metadata servers if that is unset.
COMPILER_ALONE = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_SKIP_MDS_QUERY": "1",
}


def _status(result: dict[str, Any]) -> int:
    return result.get("status", STOPPED) if result.get("stopped") else 0


def _finish_run(config: RunConfig, result: dict[str, Any]) -> int:
    """Writes the report of a finished run; returns the exit status."""
    from compass_jax.distributed import is_main_process

    if result["stopped"]:
        return _status(result)
    if is_main_process():
        from compass_jax.report import run_report

        run_report([config.directory])
    return STRICT if result.get("status") == STRICT else 0


def _flags(options: Any, *names: str) -> dict[str, Any]:
    return {name: True for name in names if getattr(options, name)}


def demo(options: commands.Demo) -> int:
    """Runs the demo."""
    from compass_jax.commands.demo import run_demo

    keep_compiled(options)
    return _status(run_demo(options.out, options.seed, options.quick))


def sft(options: commands.Sft, config: RunConfig) -> int:
    """Trains by supervised fine-tuning."""
    from compass_jax.training.sft import run_sft

    return _finish_run(config, run_sft(config, **_flags(options, "lost_log")))


def train(options: commands.Train, config: RunConfig) -> int:
    """Trains by reinforcement learning."""
    from compass_jax.training.rl import run_rl

    return _finish_run(config, run_rl(config, **_flags(options, "lost_log", "strict")))


def train_judge(options: commands.TrainJudge, config: RunConfig) -> int:
    """Trains a judge on preferences."""
    from compass_jax.commands.train_judge import run_train_judge

    return _status(run_train_judge(config, options.scalar))


def data(options: commands.Data, config: RunConfig) -> int:
    """Shows prompts and checks their rewards."""
    from compass_jax.commands.look import run_look

    run_look(config, options.most)
    return 0


def evaluate(options: commands.Eval, config: RunConfig) -> int:
    """Evaluates a checkpoint, or each checkpoint of a run in training."""
    if options.follow:
        from compass_jax.commands.follow import follow

        warning: Any = follow(config, options.checkpoint, options.out, strict=options.strict)
    else:
        from compass_jax.experience.evaluate import run_eval

        out = options.out or None
        result = run_eval(config, options.checkpoint, out, as_json=options.json)
        warning = result.get("warning")
    return STRICT if options.strict and warning else 0


def calibrate_alpha(options: commands.CalibrateAlpha, config: RunConfig) -> int:
    """Measures ESPO's clip fraction against alpha."""
    from compass_jax.commands.calibrate import run_calibration

    run_calibration(config, options.checkpoint, options.out, options.alphas, options.target_clip)
    return 0


def filter_prompts(options: commands.Filter, config: RunConfig) -> int:
    """Estimates pass rates and selects prompts."""
    from compass_jax.commands.offline_filter import run_filter

    bounds = options.low, options.high
    run_filter(config, options.checkpoint, options.out, options.samples, *bounds)
    return 0


def plan(options: commands.Plan, config: RunConfig) -> int:
    """Compiles a step for TPUs."""
    os.environ.update(COMPILER_ALONE)
    from compass_jax.commands.plan import run_plan

    return run_plan(
        config,
        options.topology,
        as_json=options.json,
        png=options.png or None,
        searched=options.search,
        any_versions=options.any_versions,
    )


def import_hf(options: commands.ImportHf) -> int:
    """Converts a Hugging Face folder into a checkpoint."""
    from compass_jax.weights.convert import import_hf as convert

    with FolderLock(options.out):
        convert(options.src, options.out, family=options.family)
        print(f"written: {options.out}")
    return 0


def _write_model(out: str, write: Callable[[], Any]) -> int:
    """Calls `write`, which writes a model into the new folder `out`, and says what takes it."""
    with NewFolderLock(out):
        path = write()
        print(f"written: {path}; compass train --model {out} trains it")
    return 0


def merge_lora(options: commands.MergeLora) -> int:
    """Adds LoRA adapters to their base."""
    from compass_jax.weights.peft import merge_adapters

    arguments = options.base, options.adapters, options.out, options.weights
    return _write_model(options.out, lambda: merge_adapters(*arguments))


def import_gguf(options: commands.ImportGguf) -> int:
    """Converts a GGUF file into a Hugging Face folder."""
    from compass_jax.weights.gguf_folder import import_gguf as convert

    return _write_model(options.out, lambda: convert(options.src, options.out, options.dtype))


def upcycle(options: commands.Upcycle) -> int:
    """Makes a mixture of experts from a dense model."""
    from compass_jax.weights.upcycle import upcycle as convert

    sizes = options.experts, options.top_k, options.noise, options.seed
    return _write_model(options.out, lambda: convert(options.src, options.out, *sizes))


def export_hf(options: commands.ExportHf) -> int:
    """Converts a checkpoint into a Hugging Face folder."""
    from compass_jax.weights.convert import export_hf as convert
    from compass_jax.weights.peft import export_adapter

    with NewFolderLock(options.out):
        if options.adapter:
            path = export_adapter(options.checkpoint, options.out)
            print(f"written: {path}; peft reads it by PeftModel.from_pretrained")
            return 0
        path = convert(options.checkpoint, options.out)
        print(f"written: {path}; transformers reads it by AutoModelForCausalLM")
    return 0


def check(options: commands.Check) -> int:
    """Checks a folder; compares it with transformers on request."""
    from compass_jax.commands.check import run_check

    sound = run_check(options.path, options.family)
    if sound and options.against:
        from compass_jax.commands.against import run_against

        sound = run_against(options.path, options.family)
    return 0 if sound else 1


def serve(options: commands.Serve) -> int:
    """Serves a model."""
    from compass_jax.commands.serve import run_serve

    keep_compiled(options)
    run_serve(options)
    return 0


def init(options: commands.Init) -> int:
    """Writes a configuration file."""
    from compass_jax.commands.initial import write_initial

    if not options.model:
        raise ConfigError("--model FOLDER is missing: which model is to be trained?")
    path = write_initial(config_from_options(options, command="init"), options.out)
    print(f"written: {path}; next: compass train {path}")
    return 0


def show(options: commands.Show) -> int:
    """Shows samples of a run."""
    from compass_jax.commands.show import run_show

    run_show(options.run, options.step, options.choice, options.label, options.most)
    return 0


def report(options: commands.Report) -> int:
    """Writes the page of runs, once or while a run continues."""
    from compass_jax.report import run_report, watch_report

    (watch_report if options.watch else run_report)(list(options.run), options.out)
    return 0
