"""The functions of commands that mostly call another part of the package.

Each takes the command's options, and its configuration if it has one, and returns the exit status;
None is success.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from rich.console import Console

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.errors import STRICT
from compass_jax.commands import options as commands
from compass_jax.commands.configured import config_from_options, keep_compiled, load_config_as
from compass_jax.config import ConfigError, RunConfig
from compass_jax.runs.rundir import FolderLock, NewFolderLock, NewRunLock

# 128 + SIGTERM: a run that stopped on request must not look finished to its parent process
STOPPED = 143


def _status(result: JsonObject) -> int:
    return result.get("status", STOPPED) if result.get("stopped") else 0


def _finish_run(directory: str, result: JsonObject) -> int:
    """Writes the report of a finished run; returns the exit status."""
    from compass_jax.devices.distributed import is_main_process

    if result["stopped"]:
        return _status(result)
    if is_main_process():
        from compass_jax.runs.report import run_report

        run_report([directory])
    return STRICT if result.get("status") == STRICT else 0


def _flags(options: Json, *names: str) -> JsonObject:
    return {name: value for name in names if (value := getattr(options, name))}


def demo(options: commands.Demo) -> int:
    """Runs the demo."""
    from compass_jax.commands.demo import run_demo

    keep_compiled(options)
    return _status(run_demo(options.out, options.seed, options.quick))


def sft(options: commands.Sft, config: RunConfig) -> int:
    """Trains by supervised fine-tuning."""
    from compass_jax.training.sft import run_sft

    return _finish_run(
        config.directory, run_sft(config, **_flags(options, "lost_log", "profile_steps"))
    )


def train(options: commands.Train, config: RunConfig) -> int:
    """Trains by reinforcement learning."""
    from compass_jax.training.rl import run_rl

    flags = _flags(options, "lost_log", "strict", "profile_steps")
    return _finish_run(config.directory, run_rl(config, **flags))


def train_judge(options: commands.TrainJudge, config: RunConfig) -> int:
    """Trains a judge on preferences."""
    from compass_jax.apps.pipeline.train_judge import run_train_judge

    return _status(run_train_judge(config, options.scalar))


def data(options: commands.Data, config: RunConfig) -> None:
    """Shows prompts and checks their rewards."""
    if options.predict:
        from compass_jax.commands.predict import run_predict

        return run_predict(config, options.predict, options.most)
    from compass_jax.commands.look import run_look

    run_look(config.model.vocab_size, config.scored, options.most)


def evaluate(options: commands.Eval, config: RunConfig) -> int:
    """Evaluates a checkpoint, or each checkpoint of a run in training."""
    from compass_jax.experience.evaluate import Evaluator, run_eval
    from compass_jax.training.episodes import episode_opener

    opener = episode_opener(config.data, config.rollout, config.model.vocab_size, config.seed)
    evaluator = Evaluator(config.policy, config.scored, opener)
    if options.follow:
        from compass_jax.commands.follow import follow

        warning: Any = follow(evaluator, options.checkpoint, options.out, strict=options.strict)
    else:
        out = options.out or None
        result = run_eval(evaluator, options.checkpoint, out, as_json=options.json)
        warning = result.get("warning")
    return STRICT if options.strict and warning else 0


def filter_prompts(options: commands.Filter, config: RunConfig) -> None:
    """Estimates pass rates and selects prompts."""
    from compass_jax.apps.pipeline.offline_filter import Bounds, run_filter

    bounds = Bounds(options.samples, options.low, options.high)
    run_filter(config.policy, config.scored, options.checkpoint, options.out, bounds)


def plan(options: commands.Plan, config: RunConfig) -> int:
    """Compiles every program of a step for TPUs; returns 0 if the run fits in memory, else 1."""
    from compass_jax.apps.plan.programs import Step, topology_devices
    from compass_jax.apps.plan.report import print_plan
    from compass_jax.apps.plan.run import make_plan
    from compass_jax.devices.tpu_versions import check_versions

    if not options.any_versions and config.model.moe_layers:
        remedy = ", or plan with what is here: --any-versions"
        check_versions(config.model.mixture.experts, remedy=remedy)
    width = None if sys.stdout.isatty() else 180
    console = Console(stderr=options.json, highlight=False, emoji=False, width=width)
    with console.status("starting the TPU's compiler") as status:
        tell = status.update if console.is_terminal else console.print
        step = Step(config, topology_devices(options.topology), bool(options.samplers))
        counts = options.samplers, options.answer_tokens
        result = make_plan(step, options.topology, tell, *counts)
    print_plan(result, console)
    if options.search:
        from compass_jax.apps.plan.search import search

        search(config, options.topology, options.search, console)
    if options.json:
        print(json.dumps(result.summary()))
    return 0 if result.fits else 1


def import_hf(options: commands.ImportHf) -> None:
    """Converts a Hugging Face folder into a checkpoint."""
    from compass_jax.weights.convert import import_hf as convert

    with _converting(NewRunLock(options.out)) as tell:
        convert(options.src, options.out, family=options.family, tell=tell)
        tell(f"written: {options.out}")


@contextmanager
def _converting(lock: FolderLock) -> Iterator[Callable[[str], None]]:
    """Starts the run's processes, of which the first holds `lock` and prints the yielded lines."""
    from compass_jax.devices.distributed import in_main_process, is_main_process, processes

    with processes(), ExitStack() as stack:
        in_main_process(lambda: stack.enter_context(lock))
        yield print if is_main_process() else (lambda line: None)


def _write_model(out: str, write: Callable[[], object]) -> None:
    """Calls `write`, which writes a model into the new folder `out`; prints the next command."""
    with NewFolderLock(out):
        path = write()
        print(f"written: {path}; compass train --model {out} trains it")


def merge_lora(options: commands.MergeLora) -> None:
    """Adds LoRA adapters to their base."""
    from compass_jax.weights.peft import merge_adapters

    arguments = options.base, options.adapters, options.out, options.weights
    _write_model(options.out, lambda: merge_adapters(*arguments))


def import_gguf(options: commands.ImportGguf) -> None:
    """Converts a GGUF file into a Hugging Face folder."""
    from compass_jax.weights.gguf_folder import import_gguf as convert

    _write_model(options.out, lambda: convert(options.src, options.out, options.dtype))


def upcycle(options: commands.Upcycle) -> None:
    """Makes a mixture of experts from a dense model."""
    from compass_jax.weights.upcycle import upcycle as convert

    sizes = options.experts, options.top_k, options.noise, options.seed
    _write_model(options.out, lambda: convert(options.src, options.out, *sizes))


def export_hf(options: commands.ExportHf) -> None:
    """Converts a checkpoint into a Hugging Face folder."""
    from compass_jax.devices.distributed import require_single_process
    from compass_jax.weights.convert import export_hf as convert
    from compass_jax.weights.peft import export_adapter

    if options.adapter:
        require_single_process("compass export-hf --adapter")
        with NewFolderLock(options.out):
            path = export_adapter(options.checkpoint, options.out, print)
            print(f"written: {path}; peft reads it by PeftModel.from_pretrained")
        return
    with _converting(NewFolderLock(options.out)) as tell:
        path = convert(options.checkpoint, options.out, tell=tell)
        tell(f"written: {path}; transformers reads it by AutoModelForCausalLM")


def check(options: commands.Check) -> int:
    """Checks a folder; compares it with transformers on request."""
    from compass_jax.commands.check import run_check

    sound = run_check(options.path, options.family)
    if sound and options.against:
        from compass_jax.commands.against import run_against

        sound = run_against(options.path, options.family)
    return 0 if sound else 1


def sample(options: commands.Sample) -> None:
    """Generates for a training run on another host."""
    from compass_jax.devices.distributed import processes
    from compass_jax.rollout.remote.serve import SamplerLoop

    with processes():
        keep_compiled(options)
        SamplerLoop(options.address, options.patience_s).run()


def serve(options: commands.Serve) -> None:
    """Serves a model."""
    keep_compiled(options)
    if options.tinker:
        from compass_jax.commands.serve_tinker import run_tinker

        run_tinker(options)
        return
    from compass_jax.commands.serve import run_serve

    run_serve(options)


def init(options: commands.Init) -> None:
    """Writes a configuration file."""
    from compass_jax.commands.initial import source_of, write_initial

    if not options.model:
        raise ConfigError("--model FOLDER is missing: which model is to be trained?")
    path = write_initial(source_of(config_from_options(options, command="init")), options.out)
    print(f"written: {path}; next: compass train {path}")


def show(options: commands.Show) -> None:
    """Shows samples of a run."""
    from compass_jax.commands.show import run_show

    run_show(options)


def report(options: commands.Report) -> None:
    """Writes the page of runs, once or while a run continues."""
    from compass_jax.runs.report import run_report, watch_report

    (watch_report if options.watch else run_report)(list(options.run), options.out)


def _printer() -> tuple[Console, Callable[[str], None]]:
    """Returns a console, and its function that prints a line unchanged."""
    console = Console(soft_wrap=True, emoji=False)
    return console, partial(console.print, highlight=False, markup=False)


def distil(options: commands.Distil) -> None:
    """Generates long-CoT data from a teacher, and prints pass rates and costs."""
    from compass_jax.apps.curate.distil import distil as generate
    from compass_jax.runs.report import summary_table

    console, tell = _printer()
    if not options.settings.endpoint:
        keep_compiled(options)
    report = generate(options.settings, options.out, tell)
    counts = ("prompts", "solved", "answers", "right", "cut", "kept")

    def row(label: str, one: JsonObject) -> JsonObject:
        rate, cost = one["pass_rate"], one["tokens_a_kept_answer"]
        return {
            "prompts of": label,
            **{key: one[key] for key in counts},
            "pass rate": "-" if rate is None else f"{rate:.3f}",
            "tokens": one["tokens"],
            "tokens a kept one": "-" if cost is None else f"{cost:.0f}",
        }

    rows = (*report["labels"].items(), ("all", report))
    console.print(summary_table([row(*entry) for entry in rows]))
    if failed := ", ".join(f"{name} {count}" for name, count in report["failures"].items()):
        tell(f"answers that did not come: {failed}; the same command asks for them again")
    tell(f"kept {report['kept']:,} conversations: {options.out}/train.jsonl")


def prepare_sft(options: commands.PrepareSft) -> None:
    """Filters duplicates, contamination and bad answers from conversations."""
    from compass_jax.apps.curate.prepare import prepare
    from compass_jax.apps.curate.report import overlaps, table
    from compass_jax.runs.report import summary_table

    console, tell = _printer()
    tally = prepare(options.settings, options.out, tell)
    console.print(summary_table(table(tally), title=f"{tally.rows:,} rows"))
    for line in overlaps(tally):
        tell(line)
    if options.settings.reward:
        tell(f"{tally.judged} answers were judged; {tally.unjudged} without a verdict stay")
    tell(
        f"kept {tally.rows_kept:,} rows: {options.out}/train.jsonl; examples:"
        f" {options.out}/report.md"
    )


def compare(options: commands.Compare) -> None:
    """Prints the comparison of two evaluations as tables or JSON."""
    from compass_jax.experience import paired
    from compass_jax.runs.report import summary_table

    folders = options.first, options.second
    first, second = map(paired.read_evaluation, folders)
    comparison = paired.compare(first, second)
    if options.json:
        print(json.dumps(comparison, indent=2))
        return
    console, tell = _printer()
    tell(f"from {first.folder} to {second.folder}")
    for name, one in comparison["sets"].items():
        rows = [_paired_row(what, one[what], one["k"]) for what in ("avg_at_k", "reward", "greedy")]
        console.print(summary_table(rows, title=f"{name}: {one['matched']} prompts in both"))
        tests = {"avg@k and reward": one["avg_at_k"]["test"], "greedy": one["greedy"]["test"]}
        tell("p: " + "; ".join(f"{what} by {test}" for what, test in tests.items()))
        for folder, place in zip(folders, ("only_first", "only_second"), strict=True):
            if count := one[place]:
                tell(f"{count} prompts of {name} are in {folder} alone; they are left out")
    for name, folder in comparison["only"].items():
        tell(f"the set {name} is in {folder} alone")


def _paired_row(what: str, paired: JsonObject, k: int) -> JsonObject:
    """Returns a row of a table of at most 80 columns."""

    def number(value: float | None, sign: str = "") -> str:
        if value is None:
            return "unknown"
        return format(value, f"{sign}.3f" if abs(value) < 100 else f"{sign}.3g")

    low, high = (number(x, "+") for x in paired["interval"])
    return {
        "": f"avg@{k}" if what == "avg_at_k" else what,
        "prompts": paired["prompts"],
        "first": number(paired["first"]),
        "second": number(paired["second"]),
        "change": number(paired["difference"], "+"),
        "95% interval": "unknown" if "unknown" in (low, high) else f"[{low}, {high}]",
        "p": "unknown" if paired["p"] is None else format(paired["p"], ".2g"),
    }


def pipeline(options: commands.Pipeline) -> int:
    """Runs the stages of a pipeline; returns 130 or 143 if a signal stopped it."""
    from compass_jax.apps.pipeline.run import describe_pipeline, run_pipeline
    from compass_jax.apps.pipeline.stages import Pipeline
    from compass_jax.devices.distributed import require_single_process

    out = [options.out] if options.out else []
    config = load_config_as(options.config, Pipeline, *out)
    require_single_process("compass pipeline")
    if options.dry_run or options.status:
        describe_pipeline(config, options.status)
        return 0
    return run_pipeline(config, list(options.redo), cache=options.compilation_cache)
