"""`--dry-run`: opens everything that a command opens before its first step, and describes its work.

Compiles, trains and writes nothing. Of the weights it reads only the headers.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from compass_jax.commands.settings import WIDTH, settings
from compass_jax.config import ConfigError, EvalRunConfig, RLRunConfig, RunConfig, ScoredConfig
from compass_jax.config.curriculum import at_step, stage_at
from compass_jax.config.io import read_config
from compass_jax.config.ranges import Section
from compass_jax.data.difficulty import label_of
from compass_jax.data.keep import kept_prompts
from compass_jax.data.pairs import encode_pairs, split_pairs
from compass_jax.data.prompts import evaluation_sets, fitting, in_words, train_prompts
from compass_jax.data.questions import unique_notices
from compass_jax.data.streamed import sft_records, work_in_words
from compass_jax.experience.evaluate import NOTHING_TO_EVALUATE
from compass_jax.memory import memory_line
from compass_jax.model.params import param_count
from compass_jax.records import Prompt
from compass_jax.rewards.answer_form import missing_requests
from compass_jax.rewards.joined import check_rows, sources_of
from compass_jax.runs.rundir import look_into
from compass_jax.samplers.pool import Pool
from compass_jax.session import load_tokenizer, open_scorer, with_code, with_date
from compass_jax.sharding import placements
from compass_jax.trackers.opened import check_trackers
from compass_jax.training.header import (
    describe_model,
    header,
    rl_method,
    sft_method,
    stage_line,
)
from compass_jax.training.idle_settings import idle_settings
from compass_jax.training.rate_notices import moved_schedule
from compass_jax.weights import checkpoint
from compass_jax.weights.start import check_weights

Tell = Callable[[str], None]


def run_dry(
    config: RunConfig, command: str, weights: str | None = None, tell: Tell = print
) -> None:
    """Opens everything that `compass command` opens, and reports the settings that differ from the
    defaults and the planned work. Raises the errors of the command.

    weights: the argument of --checkpoint, for a command that has it.
    """
    if command == "plan":  # plans for other devices, often without their files
        lines = [f"model  {describe_model(config.model, param_count(config.model))}"]
    elif command in ("sft", "train"):
        lines = _training(config, command, tell)
    elif command.startswith("train-judge"):
        scalar = command.endswith("--scalar")
        stages = (("scalar", "scalar"),) if scalar else (("sft", "sft"), ("rl", "train"))
        runs = ((replace(config, run_dir=f"{config.directory}/{at}"), name) for at, name in stages)
        lines = [line for run, name in runs for line in _training(run, name, tell)]
    else:
        lines = _reading(config, command, weights, tell)
    for line in [*changes(config), "", *lines]:
        tell(line)


def changes(config: Section) -> list[str]:
    """Returns a line for each setting that is not its default; sections are set apart."""
    lines: list[str] = []
    previous = ""
    for setting in settings(config):
        if setting.value == setting.default:
            continue
        section = setting.key.rpartition(".")[0].partition(".")[0]
        lines += [""] if lines and section != previous else []
        text = f"{setting.key} = {setting.words(setting.value) or 'none'}"
        if setting.default is not dataclasses.MISSING:
            text += f"  (default {setting.words(setting.default) or 'none'})"
        lines += textwrap.wrap(
            text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        previous = section
    return lines


def _training(config: RunConfig, command: str, tell: Tell) -> list[str]:
    """Returns the header that the run would print, and a line for each of its stages."""
    check_trackers(config.trackers)
    placements(config.mesh, config.local_rollout_mesh, config.rollout_apart)
    if command == "train":
        if config.samplers.acts:
            Pool(config.samplers)  # checks address and key
        with open_scorer(config):
            pass
    config = with_date(config)
    existing_run = look_into(config.directory, with_code(config))
    if command == "train":
        train, evaluated = _prompts(config, tell)
        one_pass = sum(config.data.sources[prompt.source].repeat for prompt in train)
        for text in idle_settings(config, one_pass, len({label_of(x) for x in train})):
            tell(text)
        work, total = f"{one_pass:,} prompts, {evaluated}", config.rl.steps
    else:
        tokenizer, total = load_tokenizer(config), config.sft.steps
        if command == "scalar":
            pairs, longest = split_pairs(config.data, config.seed)[0], config.sft.buckets[-1]
            counts = encode_pairs(pairs, tokenizer, longest, tell)[1]
        else:
            counts = sft_records(config, tokenizer, tell)[1]
        work = work_in_words(counts)
    done = checkpoint.latest(config.directory) if existing_run else None
    if done is None:
        check_weights(config.init_from, config.model, tell)
    if existing_run:
        before, key = read_config(config.directory), "rl" if command == "train" else "sft"
        if moved := moved_schedule(getattr(before, key), getattr(config, key), done or 0):
            tell(moved)
    stages = config.rl.stages if command == "train" else ()
    begun_after = [stage.after_steps for stage in stages if stage.after_steps < config.rl.steps]
    memory = memory_line(config, config.rl if command == "train" else config.sft)
    is_rl = command == "train"
    method = rl_method(config.rl, config.rollout) if is_rl else sft_method(config.sft)
    return [
        *header(config, work, param_count(config.model), done or 0, total, memory, method),
        *(_stage_line(config, n) for n in begun_after),
    ]


def _reading(config: EvalRunConfig, command: str, weights: str | None, tell: Tell) -> list[str]:
    """Returns lines on the prompts and weights of a command that does not train."""
    if command == "eval" and not config.data.evaluated:
        raise ConfigError(NOTHING_TO_EVALUATE)
    train, evaluated = _prompts(config, tell)
    with open_scorer(config):
        pass
    if weights is not None:
        check_weights(weights, config.model, tell)
    rows = {
        "model": describe_model(config.model, param_count(config.model)),
        "weights": weights or config.init_from or "random",
        "prompts": f"{len(train):,} of the training, {evaluated}",
    }
    return [f"{name:9}  {value}" for name, value in rows.items()]


def _prompts(config: EvalRunConfig, tell: Tell) -> tuple[list[Prompt], str]:
    """Returns the training prompts after filters, and a description of the evaluation's prompts."""
    tokenizer, longest = load_tokenizer(config), config.rollout.prompt_buckets[-1]
    tell = unique_notices(tell)
    train = train_prompts(config.data, tokenizer, config.seed, tell)
    train = fitting(train, longest, config.data.overlong, tell)
    train = kept_prompts(train, config.data.keep_file).prompts
    for line in missing_requests(
        config.data, config.rewards.answer_tag, train, partial(tokenizer.decode, special=True)
    ):
        tell(line)
    sets = evaluation_sets(config.data, config.evaluation, tokenizer, config.seed, longest, tell)
    try_rows(config, [*train, *(prompt for one in sets for prompt in one.prompts)])
    return train, in_words(sets, config.data)


def try_rows(config: ScoredConfig, prompts: Sequence[Prompt]) -> None:
    """Runs the setup or tests of the rows whose verifiers can check a row without a response.
    Raises VerifierError, with file and row, if they cannot run.
    """
    if sources_of(config.data):
        with open_scorer(config) as scorer:
            check_rows(scorer, config.data, prompts)


def _stage_line(config: RLRunConfig, done_steps: int) -> str:
    staged = at_step(config, done_steps)
    return stage_line(staged.rl, staged.rollout, stage_at(config.rl, done_steps))
