"""What can be written after `compass`: the commands, and the options that are not a
configuration's.
"""

from __future__ import annotations

import argparse
import platform
from functools import partial
from importlib import metadata
from typing import Any

from compass_jax.commands.options import OWN_FILES, add_option, own_file, programs_option
from compass_jax.errors import STRICT, CompassError, UserError
from compass_jax.runs.signals import STATUSES

_CONFIG_HELP = (
    "This configuration file, a path or a name such as tiny_reasoning_cpu, is read. Settings "
    "such as --rl.steps 3 go after it; `{} CONFIG --help` lists them all"
)
# What comes from a configuration file and its overrides, and what the command does with it.
_CONFIGURED = {
    "sft": "train by supervised fine-tuning; on an existing run directory it resumes",
    "train": "train by reinforcement learning; on an existing run directory it resumes",
    "train-judge": "train a judge on preferences: SFT, then RL with the verdict as the answer; "
    "on an existing run directory it resumes",
    "data": "show prompts as the model will see them, their lengths, and whether verifiers find "
    "their ground truths right",
    "eval": "evaluate a checkpoint on held-out prompts and evaluation sets",
    "calibrate-alpha": "measure ESPO's clip fraction and clip range against alpha, on one rollout "
    "of a given model",
    "plan": "compile a whole RL step for TPUs that are not here: memory per chip, collectives, "
    "and what to change where it does not fit",
    "filter": "estimate the pass rate of every training prompt; RL keeps those between the bounds "
    "(data.keep_file)",
}
QUICK = ("sft", "train", "train-judge", "data")  # --model may take the place of CONFIG
_SERVE = (
    "answer requests: JetStream's gRPC server, or HTTP for OpenAI's clients, over our engine "
    "(needs the extra 'serve')"
)
_ENDS = {
    0: "the command did its work",
    CompassError.exit_status: "something befell the command, or check or plan found a fault",
    UserError.exit_status: "what was given cannot be used: an option, a setting, a file",
    STRICT: "--strict ended it: the rewards say nothing",
    STATUSES[0]: "Ctrl-C (SIGINT) ended it; a training run saves its state first",
    STATUSES[1]: "SIGTERM ended it; a training run saves its state first",
}
_EPILOG = "exit status:\n" + "\n".join(f"  {n:<4} {text}" for n, text in _ENDS.items())


class _Formatter(argparse.HelpFormatter):
    """Leaves a text of several lines as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _Version(argparse.Action):
    """Prints the versions of this package, of jax, which is not imported, and of Python."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        versions = [f"{name} {metadata.version(name)}" for name in ("compass_jax", "jax")]
        print(f"{', '.join(versions)}, Python {platform.python_version()}")
        parser.exit()


def command_line() -> argparse.ArgumentParser:
    """The parser of every command's own options; a configuration's overrides are what it leaves
    over.
    """
    about = (
        "Reinforcement learning for mixture-of-experts language models, without wasted rollouts."
    )
    form: dict[str, Any] = {
        "epilog": _EPILOG,
        "formatter_class": _Formatter,
        "allow_abbrev": False,
    }
    parser = argparse.ArgumentParser(prog="compass", description=about, **form)
    text = "Prints the versions of compass_jax, jax and Python, and ends"
    parser.add_argument("--version", action=_Version, nargs=0, help=text)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, **options: Any) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, **form, **options)

    demo = command("demo", "do the main job on this machine: SFT, RL, evaluation, export; offline")
    _demo_options(demo)
    for name, text in _CONFIGURED.items():
        # --help belongs to the overrides, which are known once the configuration is.
        sub = command(name, text, add_help=False)
        words = _CONFIG_HELP.format(f"compass {name}")
        sub.add_argument("config", nargs="?", metavar="CONFIG", help=words)
        if name in QUICK:
            _quick_options(sub, name)
        sub.set_defaults(usage=sub)
        own_options(sub, name)
    _conversions(command)
    _looking(command)
    for name in OWN_FILES:
        file = own_file(name)
        sub = command(name, file.HELP)
        file.options(sub)
        sub.set_defaults(run=file.run)
    return parser


def _looking(command: Any) -> None:
    """The commands that have neither a configuration nor a file of their own."""
    _serve_options(command("serve", _SERVE))
    text = "find every fault of a run's checkpoints, of one checkpoint or of a Hugging Face folder"
    path = "This run directory, checkpoint or folder is looked through"
    sub = command("check", text)
    sub.add_argument("path", metavar="DIR", help=path)
    add_option(sub, "family", "Your own family path/file.py:FAMILY reads the Hugging Face folder")
    text = "Logits and greedy tokens of the Hugging Face folder are compared with what this package"
    text += " computes (needs the extra 'transformers')"
    add_option(sub, "against", text, choices=["transformers"])
    text = "write a commented configuration file from a model's folder and files of prompts"
    sub = command("init", text)
    sub.add_argument("out", metavar="OUT.py", help="The configuration is written to this file")
    _quick_options(sub, "init")
    text = "list verifiers, tasks and data sets, with sizes, languages and an example of each"
    _tasks_options(command("tasks", text))
    _try_options(command("try", "judge one answer as a run would, in the sandbox, and say why"))
    _judge_options(command("eval-judge", "say how often a judge says of pairs what people said"))
    _show_options(command("show", "show samples of a run: prompts, answers, rewards"))
    report = command("report", "write a page of runs: curves, waste, samples, tokens")
    report.add_argument(
        "run", metavar="RUN", nargs="+", help="These run directories are reported on, and compared"
    )
    text = "The page is written to this file; without it into the first run's directory"
    report.add_argument("--out", metavar="FILE.html", default="", help=text)
    text = "The page is written again and again while a run goes on; the command ends with the run"
    report.add_argument("--watch", action="store_true", help=text)


def _demo_options(demo: argparse.ArgumentParser) -> None:
    add_option(demo, "out", "The demo writes to this directory", default="runs/demo")
    text = "Every random draw follows from this number, which has no unit"
    add_option(demo, "seed", text, type=int, default=0)
    text = "The demo takes a few minutes: everything runs, little is learnt"
    add_option(demo, "quick", text, action="store_true")
    programs_option(demo)


def _conversions(command: Any) -> None:
    weights = "The weights are those of this run directory, or checkpoint"
    for name, source, text, there, out in (
        (
            "import-hf",
            "src",
            "convert a Hugging Face folder into a checkpoint",
            "This Hugging Face folder, with config.json and safetensors, is read",
            "This run directory gets the checkpoint",
        ),
        (
            "export-hf",
            "checkpoint",
            "convert a checkpoint into a Hugging Face folder",
            weights,
            "This new folder gets what transformers can read",
        ),
    ):
        sub = command(name, text)
        sub.add_argument(source, metavar=source.upper(), help=there)
        sub.add_argument("out", metavar="OUT", help=out)
        if name == "import-hf":
            text = "Your own family path/file.py:FAMILY reads it (default: by its model_type)"
            add_option(sub, "family", text)


def own_options(sub: argparse.ArgumentParser, name: str) -> None:
    """Adds the options of a command with a CONFIG that are no settings."""
    _configured_options(sub, name)
    text = "Opens everything that the command opens, prints the settings that are not the "
    text += "defaults and what the command would work on, and ends"
    add_option(sub, "dry-run", text, action="store_true")
    if name != "plan":
        text = "Makes a --dry-run check the configuration alone and print all of it as JSON"
        text += "; without it stdout gets summary.json alone" if name == "eval" else ""
        add_option(sub, "json", text, action="store_true")
    text = "Lists the options; after CONFIG, every setting too"
    sub.add_argument("-h", "--help", action="append_const", const=1, dest="asked", help=text)


def _configured_options(sub: argparse.ArgumentParser, name: str) -> None:
    option = partial(add_option, sub)
    if name in ("sft", "train"):
        text = "Goes on where lines of metrics.jsonl or rollouts.jsonl are missing that the "
        option("lost-log", text + "checkpoint counts", action="store_true")
    if name in ("train", "eval"):
        text = "Ends with exit status 3 (training: with everything saved) where no answer can be "
        text += "found in any response, or all of a first rollout or an evaluation are wrong"
        option("strict", text, action="store_true")
    if name in ("eval", "calibrate-alpha", "filter"):
        option(
            "checkpoint",
            "The weights are those of this run directory, or checkpoint",
            metavar="DIR",
        )
    if name == "data":
        option("most", "This count of prompts is shown whole", type=int, default=2)
    if name == "eval":
        text = "This folder gets answers.jsonl (compass show DIR reads it) and summary.json"
        option("out", text, metavar="DIR")
        text = "Evaluates each checkpoint of a run in training as it comes, until the last step's; "
        text += "--out gets a folder for each"
        option("follow", text, action="store_true")
    if name == "plan":
        _plan_options(option)
    if name == "calibrate-alpha":
        option("out", "This folder gets alpha.json", metavar="DIR")
        alphas = [0.01, 0.02, 0.03, 0.05, 0.07, 0.1]
        text = "These values of ESPO's alpha, a factor, are tried"
        option("alphas", text, type=float, nargs="+", default=alphas)
        text = "The alpha is searched that clips this share of the tokens"
        option("target-clip", text, type=float, default=0.15)
    if name == "filter":
        text = "This folder gets pass_rates.jsonl; the same command again continues"
        option("out", text, metavar="DIR")
        text = "Each prompt gets this count of sampled answers"
        option("samples", text, type=int, default=8)
        text = "Prompts with a pass rate above this share are kept"
        option("low", text, type=float, default=0.0)
        text = "Prompts with a pass rate below this share are kept"
        option("high", text, type=float, default=1.0)
    if name not in ("plan", "data"):  # it compiles for devices that are not here
        programs_option(sub)


def _plan_options(option: Any) -> None:
    text = "The plan is for these TPUs: v5p:4x4x4, v6e:16x16, tpu7x:4x4x4, ..."
    option("topology", text, metavar="NAME")
    text = "Ends with one line of JSON on stdout; everything else goes to stderr. With "
    text += "--dry-run it is the whole configuration"
    option("json", text, action="store_true")
    option("png", "This file gets a picture of every program's memory", metavar="FILE")
    text = "This count of other layouts of the training is tried, the likeliest first"
    option("search", text, type=int, default=0)
    text = "Plans with older versions of jax and libtpu, too, which train experts slowly"
    option("any-versions", text, action="store_true")


def _tasks_options(sub: argparse.ArgumentParser) -> None:
    text = "All that is known of this one is printed; reasoning_gym: a row of each data set"
    sub.add_argument("task", metavar="NAME", nargs="?", default="", help=text)


def _try_options(sub: argparse.ArgumentParser) -> None:
    option = partial(add_option, sub)
    text = "This judges: a verifier's name, a reasoning-gym data set's, file.py:task, "
    sub.add_argument("task", metavar="TASK", help=text + "file.py:function, module:name")
    text = "The model's answer; of a conversation each turn, in order; - reads standard input"
    option("response", text, action="append", default=[], metavar="TEXT")
    text = "The answer belongs to this row, an object of columns (default: an example's)"
    option("row", text, default="", metavar="JSON")
    text = "Without --row, the answer belongs to the task's row with this number, from 0"
    option("number", text, type=int, default=0)
    option(
        "seed", "The task's rows follow from this number, which has no unit", type=int, default=0
    )
    text = "The answer is the text in the last <TAG>...</TAG>; empty: the whole response"
    option("answer-tag", text, default="answer", metavar="TAG")
    text = "The verifier may take this count of seconds"
    option("timeout-s", text, type=float, default=5.0)
    text = "Guards of the verifier: all that this machine has, every one or not at all, none"
    option("sandbox", text, choices=["auto", "required", "off"], default="auto")
    text = "A task's judge answers at this address of OpenAI's API, as http://127.0.0.1:8000/v1"
    option("endpoint", text, default="", metavar="URL")
    option("model", "The endpoint knows the judge by this name", default="", metavar="NAME")
    text = "The environment variable of this name holds the endpoint's key; without it none is sent"
    option("key-env", text, default="", metavar="NAME")


def _judge_options(sub: argparse.ArgumentParser) -> None:
    option = partial(add_option, sub)
    text = "These files of rows have the pairs: candidate, anchor and verdict, or chosen "
    sub.add_argument("data", metavar="FILE", nargs="+", help=text + "and rejected")
    text = "The judge answers at this address of OpenAI's API, as http://127.0.0.1:8000/v1"
    option("endpoint", text + "; without it our own engine runs it", default="", metavar="URL")
    text = "The endpoint knows the judge by this name; without --endpoint the judge is this run "
    option("model", text + "directory, checkpoint or Hugging Face folder", required=True)
    text = "The environment variable of this name holds the endpoint's key; without it none is sent"
    option("key-env", text, default="", metavar="NAME")
    text = "The judge reasons and answers in at most this count of tokens (default: at an endpoint "
    option("max-tokens", text + "2048, and 0 is its limit; else what memory leaves)", type=int)
    text = "At most this count of requests is under way at once"
    option("requests", text, type=int, default=16)
    text = "A verdict takes at most this count of seconds in each order, tries included"
    option("timeout-s", text, type=float, default=120.0)
    option("most", "This count of pairs is asked, the first ones; 0: all", type=int, default=0)
    text = "The shares and a line for each pair are written into this new folder"
    option("out", text, default="", metavar="DIR")
    programs_option(sub)


def _show_options(show: argparse.ArgumentParser) -> None:
    option = partial(add_option, show)
    text = "The samples are those of this RL run's directory, or evaluation's folder"
    show.add_argument("run", metavar="RUN", help=text)
    text = "The samples of the step with this number are shown (default: the last one)"
    option("step", text, type=int)
    which = show.add_mutually_exclusive_group()
    for name, text in (
        ("best", "Shows the best answers"),
        ("worst", "Shows the worst answers"),
        ("truncated", "Shows answers that were cut"),
        ("varied", "Shows the best and the worst answer of groups whose rewards vary most"),
    ):
        which.add_argument(f"--{name}", dest="choice", action="store_const", const=name, help=text)
    option("label", "The samples of this data source or task are shown", metavar="NAME")
    option("most", "This count of groups is shown", type=int, default=4)


def _quick_options(sub: argparse.ArgumentParser, name: str) -> None:
    option = partial(add_option, sub)
    place = "" if name == "init" else ", in the place of CONFIG"
    text = "The model and the tokenizer are those of this Hugging Face folder or run directory"
    option("model", text + place, metavar="FOLDER")
    rows = {"sft": "conversations", "train-judge": "preferences"}.get(name, "prompts")
    tasks = "" if rows != "prompts" else ", or are those of tasks such as my_tasks.py:task"
    text = f"The {rows} are in these files or folders of them (docs/data.md){tasks}, beside --model"
    option("data", text, nargs="+", metavar="FILE")
    if name == "sft":
        return
    if name != "train-judge":
        text = "This judges answers, beside --model: math, exact, ..., file.py:function or "
        text += "module:function; several are written as NAME=WEIGHT"
        option("reward", text, nargs="+", default=["math"], metavar="NAME")
    text = "Evaluation takes this file of prompts, beside --model; without it a part of --data is "
    option("eval", text + "held out", metavar="FILE")
    text = "The settings are those of this method's paper, beside --model: espo, gspo, grpo or dapo"
    option("preset", text, default="espo", metavar="NAME")
    if name == "train-judge":
        text = "A scalar reward model is trained instead, by the sft settings alone"
        sub.add_argument("--scalar", action="store_true", help=text)


def _serve_options(serve: argparse.ArgumentParser) -> None:
    option = partial(add_option, serve)
    weights = "The weights are those of this run directory, checkpoint or Hugging Face folder"
    serve.add_argument("weights", metavar="WEIGHTS", help=weights)
    text = "The server listens on this network interface; 0.0.0.0 is every one"
    option("host", text, default="127.0.0.1")
    text = "The port has this number; with --openai, 0 is any that is free"
    option("port", text, type=int, default=9000)
    option("slots", "This count of requests is decoded together", type=int, default=16)
    text = "The longest prompt has this many tokens, a power of two"
    option("prompt-tokens", text, type=int, default=256)
    text = "The longest answer has this many tokens"
    option("max-new-tokens", text, type=int, default=256)
    text = "The logits of JetStream's requests are divided by this factor; 0 is greedy"
    option("temperature", text, type=float, default=1.0)
    text = "The slots share this count of pages of the cache; 0: each has room for the longest "
    option("cache-pages", text + "sequence", type=int, default=0)
    text = "A page of the cache holds this many tokens"
    option("page-tokens", text, type=int, default=16)
    kinds = ["float32", "bfloat16"]
    text = "The weights and what is computed have this type"
    option("dtype", text, choices=kinds, default="float32")
    text = "Stores weights in 8 bits; auto: in those that the chip multiplies fast"
    option("quantize", text, choices=["off", "e4m3", "int8", "auto"], default="off")
    text = "Stores the keys and values of the cache in 8 bits"
    option("kv-quantize", text, choices=["off", "e4m3", "int8"], default="off")
    text = "Each axis of the mesh has so many devices, as expert=4,tensor=2 (default: one device)"
    option("mesh", text, default="")
    programs_option(serve)
    text = "Serves HTTP for OpenAI's clients, which every option below needs"
    option("openai", text, action="store_true")
    text = "This count of requests may wait for a slot"
    option("max-waiting", text, type=int, default=64)
    text = "This count of connections is open at most; one more closes the oldest idle or slow one"
    option("max-connections", text, type=int, default=512)
    text = "Clients must bring this key; it is needed where other machines reach the host. The "
    text += "variable COMPASS_API_KEY says the same, and the list of processes does not show it"
    option("api-key", text, metavar="KEY")
    text = "Clients may call this server by this name, beside localhost and its address; it may "
    text += "come several times"
    option("allow-host", text, action="append", default=[], metavar="NAME")
    text = "Reads special tokens that a prompt of /v1/completions spells as control tokens; "
    text += "otherwise they are text, as they always are in the messages of a chat"
    option("trust-prompts", text, action="store_true")
