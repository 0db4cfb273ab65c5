"""`compass`: reads the command line and calls the function of the command (table.py).

Slow modules are imported by the command that needs them, so that a mistake on the command line is
answered at once.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import importlib.util
import os
import platform
import sys
from importlib import metadata

from compass_jax.base.aliases import Json
from compass_jax.base.errors import CompassError
from compass_jax.commands.parsing import HELP, help_text, is_configured, parse, repeated_option
from compass_jax.commands.table import BY_NAME, overview, unknown_command
from compass_jax.devices.allocator import tune_allocator
from compass_jax.devices.tpu_flags import attached_generation, compile_alone, set_flags
from compass_jax.runs import words
from compass_jax.runs.signals import (
    STATUSES,
    Ending,
    finish,
    hide_slow_compile_notes,
    leave,
    prepare_streams,
)

TRAINS = ("demo", "sft", "train", "train-judge")


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit status.

    0: success; 2: unusable input; 3: --strict ended the command; 1: another error of this package;
    130 and 143: SIGINT and SIGTERM.
    """
    if argv is None:
        prepare_streams()
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in HELP or not name:
        print(overview())
        return 0 if name else 2
    if name in ("version", "--version"):
        print(versions())
        return 0
    if name not in BY_NAME:
        print(unknown_command(name), file=sys.stderr)
        return 2
    if argv is None:
        if name != "plan":  # plan computes no arrays
            tune_allocator()
            set_flags(attached_generation())
        gc.set_threshold(COLLECT_AFTER)
        pass_by_absent_tpus()
        hide_slow_compile_notes()
    wants_help = any(word in HELP for word in rest)
    if wants_help and not is_configured(name):
        print(help_text(name))
        return 0
    if problem := repeated_option(name, rest):
        print(f"compass {name}: {problem}", file=sys.stderr)
        return 2
    options, settings = parse(name, [word for word in rest if word not in HELP])
    if name == "plan":
        compile_alone(options.topology)
    if argv is not None or name == "serve":  # a server handles signals itself
        return _run_reporting_errors(name, options, settings, wants_help)
    if name in TRAINS and not wants_help and sys.stdout.isatty():
        print(f"compass {name}: starting", flush=True)  # imports take seconds
    with Ending(f"compass {name}"):
        status = _run_reporting_errors(name, options, settings, wants_help)
        if status in STATUSES:
            leave(status)
        finish(status)
    return status


def versions() -> str:
    """Returns the versions of this package, of jax (which is not imported) and of Python."""
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("compass_jax", "jax"))
    return f"{packages}, Python {platform.python_version()}"


def _run_reporting_errors(name: str, options: Json, settings: list[str], wants_help: bool) -> int:
    """Returns a command's exit status. An error with a remedy is one line on stderr."""
    from compass_jax.config.ranges import check_options

    try:
        check_options(options)
        if is_configured(name):
            from compass_jax.commands.configured import run_configured

            return run_configured(name, options, settings, wants_help)
        return BY_NAME[name].run(options)
    except Exception as error:
        text = words.in_words(error)
        if text is None:
            raise
        with contextlib.suppress(OSError):
            print(f"compass {name}: {text}", file=sys.stderr)
        return error.exit_status if isinstance(error, CompassError) else 1


# Tracing a program makes many small objects that stay. By Python's default each 700 of them are
# followed by a collection, which takes a tenth of a start.
COLLECT_AFTER = 20_000  # objects


def pass_by_absent_tpus() -> None:
    """Keeps JAX from looking for TPUs for minutes on a machine that has their compiler (for
    `compass plan`) but neither TPUs nor a GPU.
    """
    devices = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")
    if importlib.util.find_spec("libtpu") and not any(glob.glob(pattern) for pattern in devices):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
