"""The commands of `compass`. Thin: it reads the command line, and hands over to the room that does the work.

What is slow to import is imported by the command that needs it, so that a mistake on the command line is answered at once.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import inspect
import json
import os
import sys
import typing
from pathlib import Path
from typing import Any

from compass_jax.config import ConfigError, ProceduralSource, RunConfig
from compass_jax.config_io import config_to_json, tuples
from compass_jax.untrusted import parse_json

_CONFIG_HELP = "a configuration file (configs/x.py, or x), then overrides such as --rl.steps 3; `{} CONFIG --help` lists them all"


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0; 2 for a setting that cannot be used; 1 for another error of this project."""
    if argv is None:
        if sys.argv[1:2] != ["plan"]:  # nothing is computed there, and one arena slows the compiler's threads
            tune_allocator()
        pass_by_absent_tpus()
    parser = _parser()
    args, overrides = parser.parse_known_args(argv)
    if overrides and "config" not in args:
        parser.error(f"{args.command} does not know {' '.join(overrides)}")
    try:
        return _run(args, overrides)
    except Exception as error:
        # The project's own errors say in their message what was wrong and what to do; a traceback would only hide it.
        if not type(error).__module__.startswith("compass_jax"):
            raise
        print(f"compass {args.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


# Large pages; freed memory stays with the process, in one arena (another one hands large blocks back to the kernel whatever the thresholds).
TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296:glibc.malloc.arena_max=1"


def tune_allocator(module: str = "compass_jax") -> None:
    """Starts the process again, as `python -m module`, with an allocator that keeps its memory, which only its environment can switch on.

    XLA's CPU backend allocates a step's temporaries anew at every call; the kernel spends up to half of a training step on
    page faults when glibc returns them in between. Does nothing where the variable is set already, or is not glibc's.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or "hugetlb" in tunables:
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, TUNABLES]))
    os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


def pass_by_absent_tpus() -> None:
    """Keeps JAX from looking for TPUs for minutes where their compiler is installed (for `compass plan`) and neither they nor a GPU are."""
    devices = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")
    if importlib.util.find_spec("libtpu") and not any(glob.glob(pattern) for pattern in devices):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def load_config(name: str) -> RunConfig:
    """The RunConfig that a configuration file makes: its one public function, called without arguments.

    name: a path, or a bare name looked up as configs/<name>.py. Raises ConfigError where there is no such file or function.
    """
    path = next((p for p in (Path(name), Path("configs") / name, Path("configs") / f"{name}.py") if p.is_file()), None)
    if path is None:
        known = ", ".join(sorted(p.stem for p in Path("configs").glob("*.py"))) or "none here"
        raise ConfigError(f"no configuration file {name}: give the path of a .py file, or one of configs/: {known}")
    spec = importlib.util.spec_from_file_location(f"compass_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: a configuration is a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = [f for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_") and f.__module__ == module.__name__]
    if len(own) != 1:
        names = ", ".join(f.__name__ for f in own) or "none"
        raise ConfigError(f"{path}: must have exactly one public function, which returns a RunConfig; it has {names}")
    config = own[0]()
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{path}: {own[0].__name__}() returned {type(config).__name__}, not a RunConfig")
    return config


def override(config: RunConfig, arguments: list[str], prog: str = "compass") -> RunConfig:
    """`config` with typed overrides applied (`--rl.steps 3`, `--rl.normalize-std False`, `--data.sources.0.size 50`).

    An unknown key (with the nearest ones) or a value of the wrong type is told on stderr and exits with code 2.
    """
    import tyro

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_source_options)
    with registry:
        # Flat: which family of source, and whether there are experts, is decided by the configuration file.
        hint = tyro.conf.configure(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)(RunConfig)
        return tyro.cli(hint, default=config, args=arguments, prog=prog, description=RunConfig.__doc__)


def _source_options(info: Any) -> Any:
    """Lets tyro write a procedural source's options, whose values are of many types, as JSON."""
    from tyro.constructors import PrimitiveConstructorSpec

    hint = typing.get_type_hints(ProceduralSource)["options"]
    if typing.get_args(info.type) != typing.get_args(hint):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: tuples(parse_json(words[0], "options", error=ConfigError)),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [json.dumps(value)],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compass", description="Reinforcement learning for mixture-of-experts language models, without wasted rollouts.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, **options: Any) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False, **options)

    demo = command("demo", "the main job on this machine: SFT, RL, evaluation, export; on a CPU, offline")
    demo.add_argument("--out", default="runs/demo", help="directory to write to (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="seed of everything random (default: %(default)s)")
    for name, text in (
        ("sft", "supervised fine-tuning"),
        ("train", "reinforcement learning; on an existing run directory it resumes"),
        ("eval", "evaluate a checkpoint on held-out prompts"),
        ("calibrate-alpha", "ESPO's clip fraction and clip range against alpha, on one rollout of a given model"),
        ("plan", "compile a whole RL step for TPUs that are not here: memory per chip, collectives, and what to change where it does not fit"),
        ("filter", "estimate the pass rate of every training prompt; RL keeps those between the bounds (data.keep_file)"),
    ):
        # --help belongs to the overrides, which are known once the configuration is.
        sub = command(name, text, add_help=False)
        sub.add_argument("config", nargs="?", metavar="CONFIG", help=_CONFIG_HELP.format(f"compass {name}"))
        sub.add_argument("--dry-run", action="store_true", help="print the resolved configuration as JSON and stop")
        sub.set_defaults(usage=sub)
        if name in ("eval", "calibrate-alpha", "filter"):
            sub.add_argument("--checkpoint", metavar="DIR", help="a run directory, or one of its checkpoints")
        if name == "plan":
            sub.add_argument("--topology", metavar="NAME", help="v5p:4x4x4, v6e:16x16, tpu7x:4x4x4, ...")
            sub.add_argument("--json", action="store_true", help="end with one line of JSON on stdout; everything else goes to stderr")
            sub.add_argument("--png", metavar="FILE", help="draw the memory of every program")
            sub.add_argument("--search", type=int, default=0, metavar="N", help="try so many other layouts of the training, the likeliest first")
        if name == "calibrate-alpha":
            sub.add_argument("--out", metavar="DIR", help="where to write alpha.json")
            sub.add_argument("--alphas", type=float, nargs="+", default=[0.01, 0.02, 0.03, 0.05, 0.07, 0.1], help="(default: %(default)s)")
            sub.add_argument("--target-clip", type=float, default=0.15, help="clip fraction to aim at (default: %(default)s)")
    sub.add_argument("--out", metavar="DIR", help="where to write; the same command again continues")
    sub.add_argument("--samples", type=int, default=8, help="answers to each prompt (default: %(default)s)")
    sub.add_argument("--low", type=float, default=0.0, help="keep prompts with a pass rate above this (default: %(default)s)")
    sub.add_argument("--high", type=float, default=1.0, help="and below this (default: %(default)s)")
    for name, source, text in (
        ("import-hf", "src", "a Hugging Face folder into a checkpoint"),
        ("export-hf", "checkpoint", "a checkpoint into a Hugging Face folder"),
    ):
        sub = command(name, text)
        sub.add_argument(source, metavar=source.upper())
        sub.add_argument("out", metavar="OUT")
    serve = command("serve", "JetStream's gRPC server, or HTTP for OpenAI's clients, over our engine (needs the extra 'serve')")
    command("check", "every fault of a run's checkpoints, of one checkpoint or of a Hugging Face folder").add_argument("path", metavar="DIR")
    _serve_options(serve)
    command("report", "table and curves of a run").add_argument("run", metavar="RUN", help="a run directory")
    return parser


def _serve_options(serve: argparse.ArgumentParser) -> None:
    def option(name: str, text: str, **options: Any) -> None:
        said = "" if "action" in options or "default" not in options else " (default: %(default)s)"
        serve.add_argument(f"--{name}", help=text + said, **options)

    weights = "a run directory, one of its checkpoints, or a Hugging Face folder"
    serve.add_argument("weights", metavar="WEIGHTS", help=weights)
    option("host", "interface to listen on; 0.0.0.0 is every one", default="127.0.0.1")
    option("port", "with --openai, 0 is any that is free", type=int, default=9000)
    option("slots", "requests decoded together", type=int, default=16)
    option("prompt-tokens", "longest prompt, a power of two", type=int, default=256)
    option("max-new-tokens", "longest answer", type=int, default=256)
    option("temperature", "of JetStream's requests; 0 is greedy", type=float, default=1.0)
    option("openai", "HTTP, which everything below needs", action="store_true")
    option("max-waiting", "requests that may wait for a slot", type=int, default=64)
    text = "at most so many connections; one more closes the oldest idle or slow one"
    option("max-connections", text, type=int, default=512)
    text = "clients must bring this key; needed where other machines reach the host. The variable "
    text += "COMPASS_API_KEY says the same, and the list of processes does not show it"
    option("api-key", text, metavar="KEY")
    text = "clients may call this server by this name, too, beside localhost and its address"
    option("allow-host", text + "; may come several times", action="append", default=[], metavar="NAME")
    text = "read special tokens that a prompt of /v1/completions spells as control tokens; otherwise "
    text += "they are text, as they always are in the messages of a chat"
    option("trust-prompts", text, action="store_true")


def _run(args: argparse.Namespace, overrides: list[str]) -> int:
    if "config" in args:
        return _run_config(args, overrides)
    if args.command == "demo":
        from compass_jax.demo import run_demo

        return STOPPED if run_demo(args.out, args.seed).get("stopped") else 0
    if args.command == "import-hf":
        from compass_jax.weights.hf import import_hf

        import_hf(args.src, args.out)
    elif args.command == "export-hf":
        from compass_jax.weights.hf import export_hf

        export_hf(args.checkpoint, args.out)
    elif args.command == "check":
        from compass_jax.check import run_check

        return 0 if run_check(args.path) else 1
    elif args.command == "serve":
        from compass_jax.serve import ServeConfig, run_serve

        run_serve(ServeConfig(**{name: value for name, value in vars(args).items() if name != "command"}))
    else:
        from compass_jax.report import run_report

        run_report(args.run)
    return 0


STOPPED = 143  # 128 + SIGTERM: whoever started the command must not take a run that stopped on request for a finished one


def _report_if_done(config: RunConfig, result: dict[str, Any]) -> int:
    """The table and the curves of a run that reached its end; the exit status."""
    from compass_jax.distributed import first

    if result["stopped"]:
        return STOPPED
    if first():
        from compass_jax.report import run_report

        run_report(config.directory)
    return 0


COMPILER_ALONE = {
    "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5p-8", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0", "TPU_SKIP_MDS_QUERY": "1",
}  # fmt: skip


def _plan(config: RunConfig, args: argparse.Namespace) -> int:
    if args.topology is None:
        raise ConfigError("--topology NAME is missing: for which TPUs? For example v5p:4x4x4")
    # The TPU's compiler runs on the CPU. It asks its environment what machine this is, and a cloud's servers where that says nothing.
    os.environ.update(COMPILER_ALONE)
    from compass_jax.plan.run import run_plan

    return run_plan(config, args.topology, as_json=args.json, png=args.png, searched=args.search)


def _run_config(args: argparse.Namespace, overrides: list[str]) -> int:
    if args.config is None or args.config.startswith("-"):
        args.usage.print_help()
        return 0 if {"-h", "--help"} & set(overrides) else 2
    config = override(load_config(args.config), overrides, prog=f"compass {args.command} {args.config}")
    config = config.validate_for_rl() if args.command in ("train", "plan") else config.validate()
    if args.dry_run:
        print(config_to_json(config))
        return 0
    if args.command == "plan":
        return _plan(config, args)
    if args.command not in ("sft", "train") and args.checkpoint is None:
        raise ConfigError(f"--checkpoint DIR is missing: which weights is compass {args.command} to use?")
    if args.command in ("calibrate-alpha", "filter") and args.out is None:
        raise ConfigError(f"--out DIR is missing: where is compass {args.command} to write?")
    from compass_jax.distributed import processes, refuse

    if args.command in ("calibrate-alpha", "filter"):
        refuse(f"compass {args.command}")
    with processes():
        status = _run_with(args, config)
    return status


def _run_with(args: argparse.Namespace, config: RunConfig) -> int:
    """The work of a command that has a configuration; the exit status."""
    if args.command == "sft":
        from compass_jax.train.sft import run_sft

        return _report_if_done(config, run_sft(config))
    if args.command == "train":
        from compass_jax.train.loop import run_rl

        return _report_if_done(config, run_rl(config))
    if args.command == "calibrate-alpha":
        from compass_jax.calibrate import run_calibration

        run_calibration(config.validate_for_rl(), args.checkpoint, args.out, args.alphas, args.target_clip)
    elif args.command == "filter":
        from compass_jax.offline_filter import run_filter

        run_filter(config, args.checkpoint, args.out, args.samples, args.low, args.high)
    else:
        from compass_jax.evaluate import run_eval

        run_eval(config, args.checkpoint)
    return 0

