"""`--dry-run`: opens everything that a command opens before its first step, and describes its work.

Compiles, trains and writes nothing. Of the weights it reads only the headers.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from compass_jax.base.records import Prompt
from compass_jax.commands.settings import WIDTH, Setting, settings
from compass_jax.config import (
    DataConfig,
    PolicyConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    ScoredConfig,
)
from compass_jax.config.curriculum import at_step, stage_at
from compass_jax.config.errors import check
from compass_jax.config.io import read_config
from compass_jax.data.difficulty import label_of
from compass_jax.data.keep import kept_prompts
from compass_jax.data.pairs import encode_pairs, split_pairs
from compass_jax.data.prompts import evaluation_sets, fitting, in_words, train_prompts
from compass_jax.data.questions import unique_notices
from compass_jax.data.streamed import sft_records, work_in_words
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.devices.sharding import placements
from compass_jax.experience.evaluate import NOTHING_TO_EVALUATE
from compass_jax.experience.scorer import open_scorer
from compass_jax.model.params import param_count
from compass_jax.rewards.answer_form import missing_requests
from compass_jax.rewards.checks import code_of
from compass_jax.rewards.joined import check_rows, sources_of
from compass_jax.rollout.remote.pool import Pool
from compass_jax.runs.rundir import RunDir
from compass_jax.runs.trackers.opened import check_trackers
from compass_jax.training.header import (
    describe_model,
    header,
    rl_method,
    sft_method,
    stage_line,
)
from compass_jax.training.hooks.callbacks import Callbacks
from compass_jax.training.idle_settings import idle_settings
from compass_jax.training.memory import memory_line
from compass_jax.training.optim import check_optimizer
from compass_jax.training.rate_notices import moved_schedule
from compass_jax.training.session import with_date
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
        check(command != "eval" or config.data.evaluated, NOTHING_TO_EVALUATE)
        lines = _reading(config.policy, config.scored, weights, config.init_from, tell)
    for line in [*changes(settings(config)), "", *lines]:
        tell(line)


def changes(settings: Iterable[Setting]) -> list[str]:
    """Returns a line for each setting that is not its default; sections are set apart."""
    lines: list[str] = []
    previous = ""
    for setting in settings:
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
    is_rl = command == "train"
    key, stage = ("rl", config.rl) if is_rl else ("sft", config.sft)
    check_optimizer(stage.optim, stage.steps, f"{key}.optim")
    policy = config.policy
    placements(policy.mesh, policy.local_rollout_mesh, policy.rollout_apart)
    if is_rl:
        Callbacks(config.callbacks)  # loads them
        if config.samplers.acts:
            Pool(config.samplers)  # checks address and key
        with open_scorer(config.rewards, config.data):
            pass
    data = with_date(config.data, config.model.vocab_size, config.directory)
    config = replace(config, data=data)
    existing_run = RunDir(config, code_of(data)).look()
    if is_rl:
        train, evaluated = _prompts(config.model.vocab_size, config.scored, tell)
        one_pass = sum(data.sources[prompt.source].repeat for prompt in train)
        labels = len({label_of(x) for x in train})
        for text in idle_settings(config.rl, policy, config.scored, one_pass, labels):
            tell(text)
        work = f"{one_pass:,} prompts, {evaluated}"
    else:
        tokenizer = load_tokenizer(data, config.model.vocab_size)
        if command == "scalar":
            pairs, longest = split_pairs(data, config.seed)[0], config.sft.buckets[-1]
            counts = encode_pairs(pairs, tokenizer, longest, tell)[1]
        else:
            counts = sft_records(config.sft, config.scored, tokenizer, tell)[1]
        work = work_in_words(counts)
    done = checkpoint.latest(config.directory) if existing_run else None
    if done is None:
        check_weights(config.init_from, config.model, tell)
    if existing_run:
        before = getattr(read_config(config.directory), key)
        if moved := moved_schedule(before, stage, done or 0):
            tell(moved)
    method = rl_method(config.rl, config.rollout) if is_rl else sft_method(config.sft)
    lines = header(
        describe_model(config.model, param_count(config.model)),
        config.init_from,
        (config.mesh, config.rollout_mesh),
        config.directory,
        work,
        done or 0,
        stage.steps,
        memory_line(policy, stage),
        method,
    )
    return [config.name, *lines, *(_stage_lines(config.rl, config.rollout) if is_rl else ())]


def _reading(
    policy: PolicyConfig, scored: ScoredConfig, weights: str | None, init_from: str, tell: Tell
) -> list[str]:
    """Returns lines on the prompts and weights of a command that does not train."""
    trains = bool(scored.data.sources)  # compass eval --env has none
    train, evaluated = _prompts(policy.model.vocab_size, scored, tell, trains)
    with open_scorer(scored.rewards, scored.data):
        pass
    if weights is not None:
        check_weights(weights, policy.model, tell)
    rows = {
        "model": describe_model(policy.model, param_count(policy.model)),
        "weights": weights or init_from or "random",
        "prompts": f"{len(train):,} of the training, {evaluated}",
    }
    return [f"{name:9}  {value}" for name, value in rows.items()]


def _prompts(
    vocab_size: int, scored: ScoredConfig, tell: Tell, trains: bool = True
) -> tuple[list[Prompt], str]:
    """Returns the training prompts after filters, and a description of the evaluation's prompts."""
    data, rewards, seed = scored.data, scored.rewards, scored.seed
    tokenizer, longest = load_tokenizer(data, vocab_size), scored.rollout.prompt_buckets[-1]
    tell = unique_notices(tell)
    train = train_prompts(data, tokenizer, seed, tell) if trains else []
    train = fitting(train, longest, data.overlong, tell)
    train = kept_prompts(train, data.keep_file).prompts
    for line in missing_requests(
        data, rewards.answer_tag, train, partial(tokenizer.decode, special=True)
    ):
        tell(line)
    sets = evaluation_sets(data, scored.evaluation, tokenizer, seed, longest, tell)
    try_rows(rewards, data, [*train, *(prompt for one in sets for prompt in one.prompts)])
    return train, in_words(sets, data)


def try_rows(rewards: RewardConfig, data: DataConfig, prompts: Sequence[Prompt]) -> None:
    """Runs the setup or tests of the rows whose verifiers can check a row without a response.
    Raises VerifierError, with file and row, if they cannot run.
    """
    if sources_of(data):
        with open_scorer(rewards, data) as scorer:
            check_rows(scorer, data, prompts)


def _stage_lines(rl: RLConfig, rollout: RolloutConfig) -> list[str]:
    """Returns a line for each stage that begins before the run's end."""
    begun_after = [stage.after_steps for stage in rl.stages if stage.after_steps < rl.steps]
    return [stage_line(*at_step(rl, rollout, n), stage_at(rl, n)) for n in begun_after]
