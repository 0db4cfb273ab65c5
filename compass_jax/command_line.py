"""What can be written after `compass`: the commands, and the options that are not a
configuration's.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

_CONFIG_HELP = (
    "a configuration file (configs/x.py, or x), then overrides such as --rl.steps 3; "
    "`{} CONFIG --help` lists them all"
)
# What comes from a configuration file and its overrides, and what the command does with it.
_CONFIGURED = {
    "sft": "supervised fine-tuning",
    "train": "reinforcement learning; on an existing run directory it resumes",
    "data": "prompts as the model will see them, their lengths, how their ground truths are judged",
    "eval": "evaluate a checkpoint on held-out prompts",
    "calibrate-alpha": "ESPO's clip fraction and clip range against alpha, on one rollout of a "
    "given model",
    "plan": "compile a whole RL step for TPUs that are not here: memory per chip, collectives, "
    "and what to change where it does not fit",
    "filter": "estimate the pass rate of every training prompt; RL keeps those between the bounds "
    "(data.keep_file)",
}
_SERVE = (
    "JetStream's gRPC server, or HTTP for OpenAI's clients, over our engine (needs the "
    "extra 'serve')"
)


def command_line() -> argparse.ArgumentParser:
    """The parser of every command's own options; a configuration's overrides are what it leaves
    over.
    """
    about = (
        "Reinforcement learning for mixture-of-experts language models, without wasted rollouts."
    )
    parser = argparse.ArgumentParser(prog="compass", description=about, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, **options: Any) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False, **options)

    demo = command("demo", "the main job on this machine: SFT, RL, evaluation, export; offline")
    _option(demo, "out", "directory to write to", default="runs/demo")
    _option(demo, "seed", "seed of everything random", type=int, default=0)
    _programs_option(demo)
    for name, text in _CONFIGURED.items():
        # --help belongs to the overrides, which are known once the configuration is.
        sub = command(name, text, add_help=False)
        words = _CONFIG_HELP.format(f"compass {name}")
        sub.add_argument("config", nargs="?", metavar="CONFIG", help=words)
        text = "print the resolved configuration as JSON and stop"
        _option(sub, "dry-run", text, action="store_true")
        sub.set_defaults(usage=sub)
        _configured_options(sub, name)
    for name, source, text in (
        ("import-hf", "src", "a Hugging Face folder into a checkpoint"),
        ("export-hf", "checkpoint", "a checkpoint into a Hugging Face folder"),
    ):
        sub = command(name, text)
        sub.add_argument(source, metavar=source.upper())
        sub.add_argument("out", metavar="OUT")
        if name == "import-hf":
            text = "path/file.py:FAMILY, for a family of your own (default: by its model_type)"
            _option(sub, "family", text)
    _serve_options(command("serve", _SERVE))
    text = "every fault of a run's checkpoints, of one checkpoint or of a Hugging Face folder"
    command("check", text).add_argument("path", metavar="DIR")
    sub = command(
        "init", "a commented configuration file from a model's folder and files of prompts"
    )
    sub.add_argument("out", metavar="OUT.py")
    _quick_options(sub, "init")
    _show_options(command("show", "samples of a run: prompts, answers, rewards"))
    report = command("report", "table and curves of a run")
    report.add_argument("run", metavar="RUN", help="a run directory")
    return parser


def _option(parser: argparse.ArgumentParser, name: str, text: str, **options: Any) -> None:
    said = "" if "action" in options or "default" not in options else " (default: %(default)s)"
    parser.add_argument(f"--{name}", help=text + said, **options)


def _programs_option(parser: argparse.ArgumentParser) -> None:
    text = "folder of compiled programs, which later starts take from there (default: "
    text += "~/.cache/compass_jax/programs, at most 4 GiB); off: compile at every start"
    _option(parser, "compilation-cache", text, metavar="DIR")


def _configured_options(sub: argparse.ArgumentParser, name: str) -> None:
    option = partial(_option, sub)
    if name in ("sft", "train", "data"):
        _quick_options(sub, name)
    if name not in ("plan", "data"):  # it compiles for devices that are not here
        _programs_option(sub)
    if name in ("sft", "train"):
        text = "go on where lines of metrics.jsonl or rollouts.jsonl are missing that the "
        option("lost-log", text + "checkpoint counts", action="store_true")
    if name in ("train", "eval"):
        text = "end with exit status 3 (training: with everything saved) where no answer can be "
        text += "found in any response, or all of a first rollout or an evaluation are wrong"
        option("strict", text, action="store_true")
    if name in ("eval", "calibrate-alpha", "filter"):
        option("checkpoint", "a run directory, or one of its checkpoints", metavar="DIR")
    if name == "data":
        option("most", "prompts to show whole", type=int, default=2, metavar="N")
    if name == "eval":
        text = "where to write answers.jsonl (compass show DIR reads it) and summary.json"
        option("out", text, metavar="DIR")
    if name == "plan":
        option("topology", "v5p:4x4x4, v6e:16x16, tpu7x:4x4x4, ...", metavar="NAME")
        text = "end with one line of JSON on stdout; everything else goes to stderr"
        option("json", text, action="store_true")
        option("png", "draw the memory of every program", metavar="FILE")
        text = "try so many other layouts of the training, the likeliest first"
        option("search", text, type=int, default=0, metavar="N")
        text = "plan with older versions of jax and libtpu, too, which train experts slowly"
        option("any-versions", text, action="store_true")
    if name == "calibrate-alpha":
        option("out", "where to write alpha.json", metavar="DIR")
        alphas = [0.01, 0.02, 0.03, 0.05, 0.07, 0.1]
        option("alphas", "what to try", type=float, nargs="+", default=alphas)
        option("target-clip", "clip fraction to aim at", type=float, default=0.15)
    if name == "filter":
        option("out", "where to write; the same command again continues", metavar="DIR")
        option("samples", "answers to each prompt", type=int, default=8)
        option("low", "keep prompts with a pass rate above this", type=float, default=0.0)
        option("high", "and below this", type=float, default=1.0)


def _show_options(show: argparse.ArgumentParser) -> None:
    option = partial(_option, show)
    show.add_argument("run", metavar="RUN", help="the directory of an RL run")
    option("step", "of this step (default: the last one)", type=int, metavar="N")
    which = show.add_mutually_exclusive_group()
    for name, text in (
        ("best", "the best answers"),
        ("worst", "the worst answers"),
        ("truncated", "answers that were cut"),
        ("varied", "the best and the worst answer of groups whose rewards vary most"),
    ):
        which.add_argument(f"--{name}", dest="choice", action="store_const", const=name, help=text)
    option("label", "of one data source or task", metavar="NAME")
    option("most", "groups to show", type=int, default=4, metavar="N")


def _quick_options(sub: argparse.ArgumentParser, name: str) -> None:
    option = partial(_option, sub)
    text = "without CONFIG: a Hugging Face folder or a run directory, whose model and tokenizer "
    option("model", text + "are used", metavar="FOLDER")
    rows = "conversations" if name == "sft" else "prompts"
    option("data", f"with --model: files of {rows}, .jsonl or .parquet", nargs="+", metavar="FILE")
    if name == "sft":
        return
    text = "with --model: what judges an answer: math, exact, ..., file.py:function or "
    text += "module:function; several as NAME=WEIGHT (default: math)"
    option("reward", text, nargs="+", default=["math"], metavar="NAME")
    option("eval", "with --model: prompts to evaluate on, else a part of --data", metavar="FILE")
    option("preset", "with --model: espo, gspo, grpo or dapo, as its paper has it", default="espo")


def with_config(words: list[str]) -> list[str]:
    """`words` with an empty CONFIG where --model takes its place: an override's value would be
    read as one.
    """
    quick = (
        words[:1] in (["sft"], ["train"], ["data"])
        and len(words) > 1
        and any(word == "--model" or word.startswith("--model=") for word in words)
    )
    return [words[0], "", *words[1:]] if quick and words[1].startswith("-") else words


def _serve_options(serve: argparse.ArgumentParser) -> None:
    option = partial(_option, serve)
    _programs_option(serve)
    weights = "a run directory, one of its checkpoints, or a Hugging Face folder"
    serve.add_argument("weights", metavar="WEIGHTS", help=weights)
    option("host", "interface to listen on; 0.0.0.0 is every one", default="127.0.0.1")
    option("port", "with --openai, 0 is any that is free", type=int, default=9000)
    option("slots", "requests decoded together", type=int, default=16)
    option("prompt-tokens", "longest prompt, a power of two", type=int, default=256)
    option("max-new-tokens", "longest answer", type=int, default=256)
    option("temperature", "of JetStream's requests; 0 is greedy", type=float, default=1.0)
    text = "pages of the cache that the slots share; 0: each has room for the longest sequence"
    option("cache-pages", text, type=int, default=0)
    option("page-tokens", "positions of a page", type=int, default=16)
    kinds = ["float32", "bfloat16"]
    option("dtype", "of the weights and of what is computed", choices=kinds, default="float32")
    text = "weights in 8 bits; auto: those that the chip multiplies fast"
    option("quantize", text, choices=["off", "e4m3", "int8", "auto"], default="off")
    text = "keys and values of the cache in 8 bits"
    option("kv-quantize", text, choices=["off", "e4m3", "int8"], default="off")
    option(
        "mesh", "devices along each axis, as expert=4,tensor=2 (default: one device)", default=""
    )
    option("openai", "HTTP, which everything below needs", action="store_true")
    option("max-waiting", "requests that may wait for a slot", type=int, default=64)
    text = "at most so many connections; one more closes the oldest idle or slow one"
    option("max-connections", text, type=int, default=512)
    text = "clients must bring this key; needed where other machines reach the host. The variable "
    text += "COMPASS_API_KEY says the same, and the list of processes does not show it"
    option("api-key", text, metavar="KEY")
    text = "clients may call this server by this name, too, beside localhost and its address"
    option(
        "allow-host", text + "; may come several times", action="append", default=[], metavar="NAME"
    )
    text = (
        "read special tokens that a prompt of /v1/completions spells as control tokens; otherwise "
    )
    text += "they are text, as they always are in the messages of a chat"
    option("trust-prompts", text, action="store_true")
