"""The commands of `compass`. Thin: it reads the command line, and hands over to the room that does
the work.

What is slow to import is imported by the command that needs it, so that a mistake on the command
line is answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import glob
import importlib.util
import os
import sys
from typing import Any

from compass_jax.commands.command_line import command_line
from compass_jax.commands.configless import with_config
from compass_jax.commands.configured import (
    from_words,
    load_config,
    of_run,
    of_settings,
    override,
)
from compass_jax.commands.options import OWN_FILES, keep_programs
from compass_jax.commands.settings_help import first_settings, settings_help
from compass_jax.config import ConfigError, RunConfig
from compass_jax.config.io import config_to_json
from compass_jax.config.ranges import check_fields
from compass_jax.errors import STRICT, CompassError
from compass_jax.families import find as families
from compass_jax.runs import words
from compass_jax.runs.rundir import FolderLock, NewFolderLock, staged, with_recorded_sizes
from compass_jax.runs.signals import STATUSES, Ending, leave
from compass_jax.runs.streams import outlast_streams, prepare_streams

PRINTS = ("check", "compare", "data", "plan", "report", "show", "tasks", "try")
PRINTING = ("asked", "dry_run", "json", "status")  # options by which another command prints only
TRAINS = ("demo", "sft", "train", "train-judge")


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0; 2 for what a person gave and cannot be used;
    3 for what --strict ended; 1 for another error of this project.

    130 and 143 are those of SIGINT and SIGTERM, whether the command saved something before it left
    or not.
    """
    if argv is None:
        prepare_streams()
        # nothing is computed there
        if sys.argv[1:2] != ["plan"]:
            tune_allocator()
        pass_by_absent_tpus()
    parser = command_line()
    args, overrides = parser.parse_known_args(with_config(sys.argv[1:] if argv is None else argv))
    if overrides and ("config" not in args or args.command in OWN_FILES):
        parser.error(f"{args.command} does not know {' '.join(overrides)}")
    if argv is None and _writes_files(args):
        outlast_streams()
    if argv is not None or args.command == "serve":  # a server ends in its own way
        return _told(args, overrides)
    if args.command in TRAINS and not getattr(args, "asked", False) and sys.stdout.isatty():
        print(f"compass {args.command}: starting", flush=True)  # imports take seconds
    with Ending(f"compass {args.command}"):
        status = _told(args, overrides)
        if status in STATUSES:
            leave(status)
    return status


def _writes_files(args: argparse.Namespace) -> bool:
    """Whether the command's results are files, or answers to requests, so that it can go on when
    nobody reads what it prints.
    """
    options = vars(args)
    if args.command in PRINTS or any(options.get(x) for x in PRINTING):
        return False
    return args.command != "eval" or bool(options.get("out"))


def _told(args: argparse.Namespace, overrides: list[str]) -> int:
    """The command's exit status.

    An error that says what was wrong and what to do is one line: a traceback would only hide that.
    """
    try:
        return _run(args, overrides)
    except Exception as error:
        text = words.in_words(error)
        if text is None:
            raise
        with contextlib.suppress(OSError):
            print(f"compass {args.command}: {text}", file=sys.stderr)
        return error.exit_status if isinstance(error, CompassError) else 1


# Large pages; freed memory stays with the process. As many arenas as threads want: with one, the
# compiler's threads wait for each other (a cold start takes 1.6 times as long), and a step is not
# faster.
TUNABLES = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_threshold=1073741824",
        "glibc.malloc.trim_threshold=4294967296",
    )
)


def tune_allocator() -> None:
    """Starts the process again, by the command that started it, with an allocator that keeps its
    memory, which only its environment can switch on.

    XLA's CPU backend allocates a step's temporaries anew at every call; the kernel spends up to
    half of a training step on page faults when glibc returns them in between. Does nothing where
    the variable is set already, or is not glibc's.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or "hugetlb" in tunables:
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, TUNABLES]))
    # as it was started: `-m compass_jax` would look in the current folder first
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def pass_by_absent_tpus() -> None:
    """Keeps JAX from looking for TPUs for minutes where their compiler is installed (for `compass
    plan`) and neither they nor a GPU are.
    """
    devices = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")
    if importlib.util.find_spec("libtpu") and not any(glob.glob(pattern) for pattern in devices):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _run(args: argparse.Namespace, overrides: list[str]) -> int:
    if args.command in OWN_FILES:
        return args.run(args)
    if "config" in args:
        return _run_config(args, overrides)
    if args.command == "demo":
        from compass_jax.commands.demo import run_demo

        keep_programs(args)
        result = run_demo(args.out, args.seed, args.quick)
        return result.get("status", STOPPED) if result.get("stopped") else 0
    if args.command == "import-hf":
        from compass_jax.weights.convert import import_hf

        with FolderLock(args.out):
            import_hf(args.src, args.out, family=args.family)
            print(f"written: {args.out}")
    elif args.command == "export-hf":
        from compass_jax.weights.convert import export_hf

        with NewFolderLock(args.out):
            path = export_hf(args.checkpoint, args.out)
            print(f"written: {path}; transformers reads it by AutoModelForCausalLM")
    elif args.command == "check":
        from compass_jax.commands.check import run_check

        sound = run_check(args.path, args.family)
        if sound and args.against:
            from compass_jax.commands.against import run_against

            sound = run_against(args.path, args.family)
        return 0 if sound else 1
    elif args.command == "serve":
        from compass_jax.commands.serve import ServeConfig, run_serve

        keep_programs(args)
        given = {field.name for field in dataclasses.fields(ServeConfig)}
        run_serve(ServeConfig(**{name: x for name, x in vars(args).items() if name in given}))
    elif args.command == "init":
        from compass_jax.commands.initial import write_initial

        if not args.model:
            raise ConfigError("--model FOLDER is missing: which model is to be trained?")
        path = write_initial(from_words(args), args.out)
        print(f"written: {path}; next: compass train {path}")
    elif args.command == "tasks":
        from compass_jax.commands.catalogue import run_tasks

        run_tasks(args.task)
    elif args.command == "try":
        return _try(args)
    elif args.command == "eval-judge":
        _eval_judge(args)
    elif args.command == "show":
        from compass_jax.commands.show import run_show

        run_show(args.run, args.step, args.choice, args.label, args.most)
    else:
        _report(args)
    return 0


def _report(args: argparse.Namespace) -> None:
    """Writes the page of runs: once, or again and again while one of them trains."""
    if args.watch:
        from compass_jax.report import watch_report

        watch_report(args.run, args.out)
    else:
        from compass_jax.report import run_report

        run_report(args.run, args.out)


def _try(args: argparse.Namespace) -> int:
    from compass_jax.commands.trial import run_try
    from compass_jax.config import JudgeConfig, RewardConfig

    judge = None
    if args.endpoint or args.model:
        judge = JudgeConfig(args.endpoint, args.model, key_env=args.key_env, retries=1)
    rewards = RewardConfig(
        timeout_s=args.timeout_s, sandbox=args.sandbox, answer_tag=args.answer_tag, judge=judge
    )
    return run_try(args.task, args.response, args.row, args.number, args.seed, rewards)


def _eval_judge(args: argparse.Namespace) -> None:
    from compass_jax.commands.eval_judge import run_eval_judge
    from compass_jax.config import JudgeConfig

    if not args.endpoint:
        if args.max_tokens is not None and args.max_tokens < 1:
            raise ConfigError(f"--max-tokens {args.max_tokens}: must be at least 1")
        keep_programs(args)
        run_eval_judge(args.data, args.model, args.out, args.most, args.max_tokens)
        return
    judge = JudgeConfig(
        args.endpoint,
        args.model,
        key_env=args.key_env,
        timeout_s=args.timeout_s,
        requests=args.requests,
        max_tokens=2048 if args.max_tokens is None else args.max_tokens,
    )
    check_fields(judge, "rewards.judge")
    run_eval_judge(args.data, judge, args.out, args.most)


FOR_RL = ("train", "train-judge", "plan", "calibrate-alpha")
STAGES = {"sft": "sft", "train": "rl"}  # what a command's own directory under runs/NAME is called

# 128 + SIGTERM: whoever started the command must not take a run that stopped on request for a
# finished one
STOPPED = 143


def _report_if_done(config: RunConfig, result: dict[str, Any]) -> int:
    """The table and the curves of a run that reached its end; the exit status."""
    from compass_jax.distributed import is_main_process

    if result["stopped"]:
        return result.get("status", STOPPED)
    if is_main_process():
        from compass_jax.report import run_report

        run_report([config.directory])
    return STRICT if result.get("status") == STRICT else 0


COMPILER_ALONE = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_SKIP_MDS_QUERY": "1",
}


def _plan(config: RunConfig, args: argparse.Namespace) -> int:
    # The TPU's compiler runs on the CPU. It asks its environment what machine this is, and a
    # cloud's servers where that says nothing.
    os.environ.update(COMPILER_ALONE)
    from compass_jax.commands.plan import run_plan

    return run_plan(
        config,
        args.topology,
        as_json=args.json,
        png=args.png,
        searched=args.search,
        any_versions=args.any_versions,
    )


def _run_config(args: argparse.Namespace, overrides: list[str]) -> int:
    quick = getattr(args, "model", None)
    of_a_run = args.command == "eval" and not args.config and args.checkpoint and not args.asked
    if not quick and not of_a_run and (not args.config or args.config.startswith("-")):
        args.usage.print_help()
        if first := first_settings(args.command):
            print(f"\n{first}")
        return 0 if args.asked else 2
    if of_a_run:
        made = of_run(args.checkpoint)
    else:
        made = from_words(args, overrides) if quick else load_config(args.config)
    with of_settings(made, args.config, []):
        check_fields(made, "")
    config = override(made, overrides, prog=f"compass {args.command} {args.config or ''}".strip())
    if args.asked:
        args.usage.print_help()
        print(f"\n{settings_help(config)}")
        return 0
    if quick and getattr(args, "preset", ""):
        from compass_jax.presets import describe_changes

        if line := describe_changes(args.preset, config):
            print(line, file=sys.stderr if args.json else sys.stdout)
    if args.command in STAGES:
        config = staged(config, STAGES[args.command])
    if quick:
        config = with_recorded_sizes(config, overrides)
    with of_settings(config, args.config, overrides):
        config = config.validate_for_rl() if args.command in FOR_RL else config.validate()
    families.check(config.model)
    if args.json and args.dry_run:
        print(config_to_json(config))
        return 0
    _check_given(args)
    if args.dry_run:
        from compass_jax.commands.dry_run import run_dry

        command = "train-judge --scalar" if getattr(args, "scalar", False) else args.command
        run_dry(config, command, getattr(args, "checkpoint", None))
        return 0
    if args.command == "plan":
        return _plan(config, args)
    if args.command == "data":
        from compass_jax.commands.look import run_look

        run_look(config, args.most)
        return 0
    from compass_jax.distributed import processes, refuse

    if args.command in ("calibrate-alpha", "filter", "train-judge"):
        refuse(f"compass {args.command}")
    if getattr(args, "follow", False):
        refuse("compass eval --follow")
    with processes():
        keep_programs(args)
        status = _run_with(args, config)
    return status


def _check_given(args: argparse.Namespace) -> None:
    """Raises ConfigError where an option is missing that the command needs."""
    if args.command == "plan" and args.topology is None:
        raise ConfigError("--topology NAME is missing: for which TPUs? For example v5p:4x4x4")
    if args.command not in ("plan", "eval") and args.json:
        raise ConfigError("--json prints the configuration of a --dry-run: give both, or neither")
    if args.command in ("eval", "calibrate-alpha", "filter") and args.checkpoint is None:
        raise ConfigError(
            f"--checkpoint DIR is missing: which weights is compass {args.command} to use?"
        )
    if args.command == "eval" and args.follow and (args.out is None or args.json):
        raise ConfigError(
            "--follow writes each evaluation into a folder of --out DIR: give one"
            if args.out is None
            else "--json prints one summary, and --follow evaluates many times: give one of the two"
        )
    if args.command in ("calibrate-alpha", "filter") and args.out is None:
        raise ConfigError(f"--out DIR is missing: where is compass {args.command} to write?")


def _run_with(args: argparse.Namespace, config: RunConfig) -> int:
    """The work of a command that has a configuration; the exit status."""
    logs: dict[str, Any] = {"lost_log": True} if getattr(args, "lost_log", False) else {}
    if args.command == "sft":
        from compass_jax.training.sft import run_sft

        return _report_if_done(config, run_sft(config, **logs))
    if args.command == "train":
        from compass_jax.training.rl import run_rl

        strict: dict[str, Any] = {"strict": True} if args.strict else {}
        return _report_if_done(config, run_rl(config, **logs, **strict))
    if args.command == "train-judge":
        from compass_jax.commands.train_judge import run_train_judge

        result = run_train_judge(config, args.scalar)
        return result.get("status", STOPPED) if result["stopped"] else 0
    if args.command == "calibrate-alpha":
        from compass_jax.commands.calibrate import run_calibration

        run_calibration(config, args.checkpoint, args.out, args.alphas, args.target_clip)
    elif args.command == "filter":
        from compass_jax.commands.offline_filter import run_filter

        run_filter(config, args.checkpoint, args.out, args.samples, args.low, args.high)
    elif args.follow:
        from compass_jax.commands.follow import follow

        told = follow(config, args.checkpoint, args.out, strict=args.strict)
        return STRICT if args.strict and told else 0
    else:
        from compass_jax.experience.evaluate import run_eval

        found = run_eval(config, args.checkpoint, args.out, as_json=args.json)
        return STRICT if args.strict and found["warning"] else 0
    return 0
