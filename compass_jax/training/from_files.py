"""A run configuration derived from a model folder, data files, a reward and the name of a method.

The model and the tokenizer come from the folder. Buckets are chosen from the lengths of the data;
slots and micro-batch sizes are chosen from the device memory. All chosen values are written to the
run's config.json and can be overridden like any setting. The same files on the same machine give
the same configuration, so the same command resumes a run.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.base.records import EPISODE, Prompt
from compass_jax.config import (
    ComputeConfig,
    ConfigError,
    DataConfig,
    EpisodeSource,
    FileSource,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PolicyConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    ScoredConfig,
    SFTConfig,
    TaskSource,
    apply,
)
from compass_jax.config.apply import NO_SETTINGS, flat_settings
from compass_jax.config.data import ENV, Source
from compass_jax.config.foreign import hub_hint
from compass_jax.config.named import is_name
from compass_jax.config.ranges import Section, describe_value, own_code
from compass_jax.config.verifiers import VERDICT
from compass_jax.data.files import DataError
from compass_jax.data.pairs import encode_pairs, split_pairs
from compass_jax.data.prompts import evaluation_sets, train_prompts
from compass_jax.data.questions import Tell
from compass_jax.data.streamed import ExampleStream, sft_records
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.devices.machine import on_cpu, usable_bytes
from compass_jax.model.params import param_count
from compass_jax.rl.bucketing import best_buckets
from compass_jax.training.memory import fitting_rows, process_bytes
from compass_jax.training.presets import default_rate, fitted_preset
from compass_jax.weights.hf_config import refuse_adapter
from compass_jax.weights.start import model_of, tokenizer_beside

# Default tokens of an episode's turns and replies, and of the messages that open it: how long they
# become is known to its environment alone.
EPISODE_TOKENS, EPISODE_ELSEWHERE, LEAST_OPENING = {"cpu": 768}, 8192, 256
LONGEST_ANSWER = {"cpu": 256}  # largest default max_new_tokens; other platforms:
LONGEST_ANSWER_ELSEWHERE = 8192
# On a CPU, where answers that run on take most of a step, the default is ANSWER_FACTOR times the
# tokens within which ANSWER_SHARE of the questions and of the references lie: a worked solution
# is about twice as long as its question (GSM8K).
ANSWER_FACTOR, ANSWER_SHARE, SHORTEST_ANSWER = 2, 0.95, 64
CACHE_LENGTHS = {"cpu": 2}  # few: a small model compiles longer than it decodes
CACHE_LENGTHS_ELSEWHERE = 8
MOST_SLOTS = {"cpu": 64}
MOST_SLOTS_ELSEWHERE = 512
# Maximum; others: 16,384. On a CPU twice as many save 3% of a step of a small model and need a
# fifth more memory.
MICRO_BATCH_TOKENS = {"cpu": 1024}
# On a CPU, above MANY_PARAMETERS, half as many tokens of a micro-batch are faster
# (benchmarks/HISTORY.md), and of half as many slots, which a step's samples fill, a step takes
# about a minute on two cores.
MANY_PARAMETERS = 50_000_000
CACHE_SHARE = 0.4  # KV cache's share of the memory left by parameters, moments, gradients
MOST_LOGITS_CPU, MOST_LOGITS = 2**24, 2**28  # that exist at once, in float32
# On a CPU an evaluation between steps has the answers of the steps before it, divided by this.
INTERIM_SHARE = 4
ROUNDED_TO = 16  # bucket lengths are multiples of this number of tokens
# Settings by which the data is measured and sizes are chosen.
_MESHES = ("mesh", "rollout_mesh", "rollout_apart", "samplers")
SIZED_BY = ("data", "sft", "seed", "compute", *_MESHES, "lora", "rollout")
ANSWER = "rollout.max_new_tokens"
SAMPLED = 1024  # rows whose lengths are measured when a data set is streamed


def _discard_notice(line: str) -> None:
    """Discards notices about the data; the run prints them when it reads the files."""


def rl_config(
    model: str,
    data: Sequence[str],
    reward: str | Mapping[str, float] = "math",
    evaluation: str = "",
    method: str = "screened",
    settings: JsonMapping = NO_SETTINGS,
) -> RunConfig:
    """Returns the configuration of an RL run.

    Args:
        model: a Hugging Face folder or a checkpoint, with its tokenizer.
        data: prompt files or folders of them, read like FileSource; or tasks ("my_tasks.py:task")
            and environments ("env:my_env.py:Game"), which bring their own rewards.
        reward: a verifier's name, "module:function" or "file.py:function"; or a mapping from
            verifiers to weights.
        evaluation: a file of evaluation prompts; empty: a part of `data` is held out.
        method: one of presets.PRESETS.
        settings: the user's, by their names (config/apply.py). Those of SIZED_BY are applied before
            the data is measured and sizes are chosen. Sizes among them stay.

    Raises:
        ConfigError, DataError, TokenizerError, WeightsError: an input cannot be used.
    """
    config = RunConfig(name=run_name(model, data), init_from=model, **_of_model(model))
    prompts = replace(config.data, sources=tuple(_source(name, reward) for name in data))
    if evaluation:
        prompts = replace(prompts, eval_sources=(_source(evaluation, reward),))
    settings = flat_settings(settings)
    config = _sized_by(replace(config, data=prompts), settings)
    training, evaluated = _prompts(config.model, config.scored)
    tokenizer = _tokenizer(config.data, config.model)
    lengths = [_prompt_length(prompt, tokenizer) for prompt in [*training, *evaluated]]
    buckets = _prompt_buckets(lengths, config.model)
    answer = config.rollout.max_new_tokens if ANSWER in settings else None
    usual = _usual_answer(tokenizer, training)
    rollout = _rollout(config.policy, buckets, answer, usual)
    config = _sized_by(replace(config, rollout=rollout), settings)
    config.rollout.validate()
    config = apply(replace(config, rl=_rl(method, config.policy, len(training))), settings)
    # sized by the steps that the user's settings make
    if "rollout.slots" not in settings:
        devices = config.policy.sampling_mesh.devices
        slots = _useful_slots(config.rollout.slots, devices, config.rl)
        config = replace(config, rollout=replace(config.rollout, slots=slots))
    if "evaluation.prompts" not in settings:
        interim = _interim_prompts(config.rl, config.evaluation.k + 1)
        config = replace(config, evaluation=replace(config.evaluation, prompts=interim))
    return config


def environment_config(
    model: str, environments: Sequence[str], settings: JsonMapping = NO_SETTINGS
) -> RunConfig:
    """Returns the configuration that evaluates a model on all rows of environments, at most
    `data.eval_prompts`, with the sizes of `rl_config`.
    """
    settings = flat_settings(settings)
    sizes = {**settings, "data.heldout_frac": 0.0, "data.eval_prompts": 0}
    config = rl_config(model, [f"{ENV}{name}" for name in environments], settings=sizes)
    data = replace(config.data, sources=(), eval_sources=config.data.sources)
    prompts = settings.get("data.eval_prompts", DataConfig.eval_prompts)
    return apply(replace(config, data=data), {"data.eval_prompts": prompts})


def sft_config(
    model: str,
    data: Sequence[str],
    settings: JsonMapping = NO_SETTINGS,
    tell: Tell = _discard_notice,
) -> RunConfig:
    """Returns the configuration of SFT on conversations. Arguments and errors are those of
    `rl_config`. `tell` receives a line where the longest row is estimated from a sample.
    """
    settings = flat_settings(settings)
    config = RunConfig(name=run_name(model, data), init_from=model, **_of_model(model))
    config = replace(config, sft=_sft(config.model, files=tuple(data)))
    config = _sized_by(config, settings)
    tokenizer = _tokenizer(config.data, config.model)
    sft = _fit_sft(config.sft, config.policy, config.scored, tokenizer, tell)
    rollout = RolloutConfig(
        prompt_buckets=(16,), max_new_tokens=min(128, config.model.max_positions - 64)
    )
    return apply(replace(config, sft=sft, rollout=rollout), settings)


def judge_config(
    model: str,
    data: Sequence[str],
    evaluation: str = "",
    method: str = "screened",
    settings: JsonMapping = NO_SETTINGS,
    scalar: bool = False,
    tell: Tell = _discard_notice,
) -> RunConfig:
    """Returns the configuration that trains a judge in two stages, SFT and RL on the same
    preference files, or a scalar reward model. Arguments and errors are those of `sft_config`.
    """
    settings = flat_settings(settings)
    config = rl_config(model, data, VERDICT, evaluation, method, settings)
    config = replace(config, sft=_sft(config.model, preferences=tuple(data)))
    config = _sized_by(config, settings)
    tokenizer, longest = _tokenizer(config.data, config.model), config.sft.buckets[-1]
    if scalar:
        training, _ = split_pairs(config.data, config.seed)
        pairs, _ = encode_pairs(training, tokenizer, longest, _discard_notice)
        sft = _size_sft(config.sft, config.policy, [pair.longest for pair in pairs])
    else:
        sft = _fit_sft(config.sft, config.policy, config.scored, tokenizer, tell)
    return apply(replace(config, sft=sft), settings)


def engine_config(
    model: str,
    conversations: Sequence[Sequence[Mapping[str, str]]],
    answer: int | None = None,
    tools: Sequence[Sequence[JsonObject]] | None = None,
) -> RunConfig:
    """Returns the configuration of an engine that answers `conversations`, each with its `tools`,
    with the weights of `model`. `answer` and the errors are those of `rl_config`.
    """
    config = RunConfig(name="engine", **_of_model(model))
    tokenizer = _tokenizer(config.data, config.model)
    lengths = [
        len(tokenizer.encode_chat([dict(one) for one in chat], tools=of_chat))
        for chat, of_chat in zip(conversations, tools or [()] * len(conversations), strict=True)
    ]
    buckets = _prompt_buckets(lengths, config.model)
    rollout = _rollout(config.policy, buckets, answer)
    return replace(config, rollout=rollout).validate()


def _of_model(path: str) -> dict[str, Any]:
    """Returns the sections of a configuration that follow from the model alone."""
    model, folder = _model(path)
    data = DataConfig(tokenizer=folder)
    return {
        "model": model,
        "compute": _compute(model),
        "mesh": _mesh(model, jax.device_count()),
        "data": data,
    }


def _sized_by(config: RunConfig, settings: JsonMapping) -> RunConfig:
    """Returns the configuration with the user's settings of SIZED_BY. All are valid but those of
    the rollout, which may fit only the sizes that are chosen later.
    """
    devices = jax.device_count()
    config = apply(config, {x: settings[x] for x in settings if x.partition(".")[0] in SIZED_BY})
    if config.rollout_apart and config.mesh == _mesh(config.model, devices):  # none was set
        sampling = config.rollout_mesh.devices if config.rollout_mesh else devices // 2
        config = replace(config, mesh=_mesh(config.model, max(devices - sampling, 1)))
    for name in (name for name in SIZED_BY if name != "rollout"):
        section = getattr(config, name)
        if isinstance(section, MeshConfig):
            section.validate(name, config.model)
        elif isinstance(section, Section):
            section.validate()
    return config


def _prompts(model: ModelConfig, scored: ScoredConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Returns the training prompts, and those evaluated."""
    tokenizer = _tokenizer(scored.data, model)
    training = train_prompts(scored.data, tokenizer, scored.seed, _discard_notice)
    evaluated: list[Prompt] = []
    with contextlib.suppress(DataError):  # no held-out prompts: the run reports it
        settings = scored.data, scored.evaluation, tokenizer, scored.seed
        for one in evaluation_sets(*settings, None, _discard_notice):
            evaluated += one.prompts
    return training, evaluated


def _prompt_length(prompt: Prompt, tokenizer: Tokenizer) -> int:
    """Returns a prompt's tokens, or room for the messages that open an episode."""
    if prompt.turns != EPISODE:
        return len(prompt.tokens)
    messages = [{"role": "user", "content": prompt.question}]
    return max(2 * len(tokenizer.encode_chat(messages)), LEAST_OPENING)


def _usual_answer(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> int:
    """Returns the default of rollout.max_new_tokens for prompts, before it is fitted to the model's
    context. Prompts without a reference, such as those of code with tests, and conversations say
    nothing about the length of an answer.
    """
    platform = jax.devices()[0].platform
    longest = LONGEST_ANSWER.get(platform, LONGEST_ANSWER_ELSEWHERE)
    if any(prompt.turns == EPISODE for prompt in prompts):
        return EPISODE_TOKENS.get(platform, EPISODE_ELSEWHERE)
    sampled = prompts[:: max(len(prompts) // SAMPLED, 1)]
    if not on_cpu() or not all(prompt.answer and not prompt.turns for prompt in sampled):
        return longest
    texts = [(prompt.question, prompt.answer) for prompt in sampled]
    usual = max(
        np.quantile([len(tokenizer.ids(text)) for text in column], ANSWER_SHARE)
        for column in zip(*texts, strict=True)
    )
    return min(max(_round_up(math.ceil(ANSWER_FACTOR * usual)), SHORTEST_ANSWER), longest)


def describe_answer(rollout: RolloutConfig, model: ModelConfig, overridden: Collection[str]) -> str:
    """Returns a line on a longest answer that was chosen from the data; empty for another.

    overridden: names of settings that the user set.
    """
    tokens = rollout.max_new_tokens
    chosen = on_cpu() and ANSWER not in overridden and tokens < LONGEST_ANSWER["cpu"]
    if not chosen or rollout.max_length + ROUNDED_TO > model.max_positions:
        return ""
    return (
        f"{ANSWER} = {tokens}: answers are cut there; about {ANSWER_FACTOR} times the longest"
        f" questions and references of the data; set {ANSWER} for longer answers"
    )


def _prompt_buckets(lengths: Sequence[int], model: ModelConfig) -> tuple[int, ...]:
    longest = min(max(lengths, default=1), model.max_positions // 2)
    bucketed = [n for n in lengths if n <= longest] or [longest]
    multiple = max(ROUNDED_TO, _round_up(longest // 64))
    return best_buckets(bucketed, 2, _round_up(longest), multiple=multiple)


def _sft(model: ModelConfig, **rows: Any) -> SFTConfig:
    """Returns the settings of SFT on `rows`, with one bucket for the model's whole context."""
    optim = OptimConfig(learning_rate=1e-5)
    return SFTConfig(buckets=(model.max_positions,), optim=optim, **rows)


def _fit_sft(
    sft: SFTConfig, policy: PolicyConfig, scored: ScoredConfig, tokenizer: Tokenizer, tell: Tell
) -> SFTConfig:
    """Returns `sft` with buckets, batch and micro-batch chosen from its examples.

    For a streamed data set, the first examples in the run's order are measured, and `tell` receives
    the bound on its rows, unless the user has set the buckets.
    """
    records, _ = sft_records(sft, scored, tokenizer, _discard_notice)
    if isinstance(records, list):
        return _size_sft(sft, policy, [example.longest for example in records])
    examples = ExampleStream(records, scored.seed).next_batch(min(SAMPLED, len(records)))
    sized = _size_sft(sft, policy, [example.longest for example in examples])
    if len(records) > SAMPLED and sft.buckets == (policy.model.max_positions,):
        tell(
            f"sft.buckets end at {sized.buckets[-1]} tokens: the longest of {SAMPLED:,} of"
            f" {len(records):,} rows was measured; longer rows are left out and counted in"
            " data/left_out_frac; set sft.buckets to keep them"
        )
    return sized


def _size_sft(sft: SFTConfig, policy: PolicyConfig, lengths: Sequence[int]) -> SFTConfig:
    """Returns `sft` with sizes chosen for examples of these lengths in tokens."""
    longest = min(_round_up(max(lengths)), sft.buckets[-1])
    buckets = best_buckets(lengths, 3, longest, multiple=max(ROUNDED_TO, _round_up(longest // 64)))
    sft = replace(sft, buckets=buckets, batch=min(64, len(lengths)))
    micro = _micro_batch(policy, sft)
    return replace(sft, micro_batch_tokens=micro)


# ---- settings chosen from the model --------------------------------------------------------------


def _model(path: str) -> tuple[ModelConfig, str]:
    """Returns (model configuration, folder of the tokenizer)."""
    if not Path(path).is_dir():
        hint = "name one with config.json, or train a small model first: compass demo"
        raise ConfigError(f"--model {path}: there is no such folder; {hub_hint(path) or hint}")
    folder = tokenizer_beside(path)
    if folder is None:
        refuse_adapter(path)
        raise ConfigError(
            f"--model {path}: no tokenizer.json is there; save the model's tokenizer there, too"
        )
    return model_of(path), str(folder)


def _source(name: str, reward: str | Mapping[str, float]) -> Source:
    if name.startswith(ENV):
        return EpisodeSource(name.removeprefix(ENV))
    return TaskSource(name) if is_name(name) else FileSource(name, verifier=own_code(reward))


def _tokenizer(data: DataConfig, model: ModelConfig) -> Tokenizer:
    args = dict(data.template_args)
    return Tokenizer.for_model(data.tokenizer, model.vocab_size, args, chat_format=data.chat_format)


def run_name(model: str, data: Sequence[str]) -> str:
    """Returns the name of a run, from the names of its model and of its first files."""
    names = [path.removeprefix(ENV) for path in data[:2]]
    words = [Path(model).absolute().name, *(Path(path).stem for path in names)]
    return re.sub(r"[^\w.-]+", "_", "-".join(words))[:100]


def _large_on_cpu(model: ModelConfig) -> int:
    """Returns the divisor of sizes on a CPU for a model above MANY_PARAMETERS; 1 otherwise."""
    return 2 if on_cpu() and param_count(model) > MANY_PARAMETERS else 1


def _compute(model: ModelConfig) -> ComputeConfig:
    """Returns bfloat16 on accelerators, remat for large and a scan for deep models, and few tokens
    whose logits exist at once where the vocabulary is large.
    """
    narrow = jax.devices()[0].platform != "cpu"
    deep, large = model.layers > 8, param_count(model) > 1e9
    chunk = (MOST_LOGITS if narrow else MOST_LOGITS_CPU) // model.vocab_size
    return ComputeConfig(
        logprob_chunk=min(max(2 ** int(math.log2(max(chunk, 1))), 128), 4096),
        dtype="bfloat16" if narrow else "float32",
        remat=large,
        scan_layers=deep,
        scan_decode=deep and large,
    )


def _mesh(model: ModelConfig, count: int) -> MeshConfig:
    """Returns a mesh of `count` devices: FSDP if they divide the hidden size, else replicas."""
    return MeshConfig(fsdp=count) if model.hidden % count == 0 else MeshConfig(replica=count)


# ---- settings chosen from the memory -------------------------------------------------------------


def _free_bytes(model: ModelConfig, compute: ComputeConfig, training: MeshConfig | None) -> float:
    """Returns the bytes of a rollout device that the process and the rollout's weights leave.
    training: the mesh whose weights, moments and gradients are there too; None: the rollout has
    separate devices.
    """
    # FSDP does not split the rollout's weights.
    each = (0 if training is None else 20 / training.fsdp) + _cache_width(compute)
    free = usable_bytes() - process_bytes() - param_count(model) * each
    return max(free, usable_bytes() / 10)


def _cache_width(compute: ComputeConfig) -> int:
    """Returns the bytes of a number of the rollout's weights and caches."""
    return 2 if compute.dtype == "bfloat16" else 4


def _rollout(
    policy: PolicyConfig, buckets: tuple[int, ...], answer: int | None, usual: int = 0
) -> RolloutConfig:
    """Returns the rollout settings. The answer length is `answer`, or `usual` (0: that of the
    platform), or the rest of the model's context; the slots of each device of the rollout are the
    largest power of two whose KV caches fit.
    """
    model, mesh = policy.model, policy.sampling_mesh
    if answer and answer >= model.max_positions:
        raise ConfigError(
            f"rollout.max_new_tokens = {describe_value(answer)}: must be below"
            f" model.max_positions = {model.max_positions}, the model's context; lower it"
        )
    platform = jax.devices()[0].platform
    longest = usual or LONGEST_ANSWER.get(platform, LONGEST_ANSWER_ELSEWHERE)
    total = buckets[-1] + (answer or longest)
    # one decode program per cache length
    lengths = CACHE_LENGTHS.get(platform, CACHE_LENGTHS_ELSEWHERE)
    bucket = max(min(total, model.max_positions) // lengths // ROUNDED_TO, 1) * ROUNDED_TO
    answer = answer or min(total, model.max_positions) // bucket * bucket - buckets[-1]
    rollout = RolloutConfig(prompt_buckets=buckets, max_new_tokens=answer, cache_bucket=bucket)
    token = model.layers * model.cache_width * _cache_width(policy.compute)
    is_apart = policy.rollout_apart or policy.samplers.acts
    free = _free_bytes(model, policy.compute, None if is_apart else policy.mesh)
    cache_bytes = CACHE_SHARE * free
    max_slots = MOST_SLOTS.get(platform, MOST_SLOTS_ELSEWHERE) // _large_on_cpu(model)
    slots = min(max(int(cache_bytes / (token * rollout.max_length)), 1), max_slots)
    return replace(rollout, slots=mesh.devices * 2 ** int(math.log2(slots)))


def _micro_batch(policy: PolicyConfig, training: RLConfig | SFTConfig, rows: int = 0) -> int:
    """Returns the tokens of the largest micro-batch that fits, at least a row per device. rows: the
    rows of a device that micro-batches of one shape are to share; 0: any.
    """
    longest, mesh = training.longest_row, policy.mesh
    platform = jax.devices()[0].platform
    most = MICRO_BATCH_TOKENS.get(platform, 16_384) // _large_on_cpu(policy.model)
    max_rows = max(most // longest, 1)
    if rows:
        max_rows = _whole_share(rows, max_rows)
    return fitting_rows(policy, training, max_rows) * longest * mesh.devices


def _whole_share(rows: int, most: int) -> int:
    """Returns the largest divisor of `rows` up to `most`; `most` if all divisors are below a half
    of it.
    """
    divisor = max(n for n in range(1, most + 1) if rows % n == 0)
    return divisor if 2 * divisor >= min(most, rows) else most


def _interim_prompts(rl: RLConfig, answers: int) -> int | None:
    """Returns the default of evaluation.prompts: on a CPU so many that an evaluation between steps
    has at most 1 / INTERIM_SHARE of the answers of the steps before it; None: all.

    answers: to each prompt, the greedy one included.
    """
    sampled = rl.eval_every * rl.prompts_per_step * rl.group_size
    return max(sampled // INTERIM_SHARE // answers, 1) if on_cpu() and sampled else None


def _useful_slots(slots: int, devices: int, rl: RLConfig) -> int:
    """Returns the slots of the rollout's devices, on a CPU no more than a step has samples in its
    first round: a token step takes as long for empty slots as for full ones.
    """
    rounds = [rl.sampling.policy.round_of(rl.sampling, i) for i in range(rl.group_size)]
    samples = rl.prompts_per_step * rounds.count(0)
    while on_cpu() and slots >= 2 * samples and slots % (2 * devices) == 0:
        slots //= 2
    return slots


def _rl(method: str, policy: PolicyConfig, prompts: int) -> RLConfig:
    """Returns the method's settings. If the preset's step has more samples than slots, the step is
    reduced to the number of slots.

    A step with fewer prompts than updates has fewer updates.
    """
    rollout = policy.rollout
    rl = fitted_preset(method, rollout.max_new_tokens, rollout.slots, prompts)
    rows, updates = rl.prompts_per_step, rl.updates_per_rollout
    longest = rollout.prompt_buckets[-1] + rollout.max_new_tokens
    buckets: tuple[int, ...] = (longest,)
    if not on_cpu() or _large_on_cpu(policy.model) > 1:
        ends = (_round_up(longest - rollout.max_new_tokens * share // 4) for share in (3, 2))
        buckets = tuple(sorted({*(end for end in ends if end < longest), longest}))
    rate = default_rate(param_count(policy.model), policy.lora.acts)
    optim = replace(rl.optim, learning_rate=rate)
    rl = replace(rl, buckets=buckets, save_every=10, eval_every=10, optim=optim)
    # A CPU compiles each shape of a small model's micro-batch longer than it saves: one divides an
    # update's rows.
    update = max(1, rl.group_size * rows // updates // policy.mesh.devices)
    share = update if len(buckets) == 1 else 0
    return replace(rl, micro_batch_tokens=_micro_batch(policy, rl, share))


def _round_up(tokens: int) -> int:
    """Returns `tokens` rounded up to a multiple of ROUNDED_TO, at least one multiple."""
    return int(-(-max(int(np.int64(tokens)), 1) // ROUNDED_TO) * ROUNDED_TO)
