"""A run directory as a Python object."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from compass_jax.base.aliases import JsonMapping, JsonObject, Tree
from compass_jax.base.records import Prompt, stable_id
from compass_jax.config import ConfigError, DataConfig, MeshConfig, PolicyConfig
from compass_jax.config.io import read_config
from compass_jax.data.messages import asked_of
from compass_jax.data.questions import with_system_prompt
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.experience.evaluate import decoder_of, decoding_weights, turns_of
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.runs.report import ReportError, run_report
from compass_jax.runs.report.metrics import Series, read_object, read_stages
from compass_jax.runs.report.samples import read_groups
from compass_jax.runs.rundir import EVALUATION, NewFolderLock
from compass_jax.weights import checkpoint
from compass_jax.weights.convert import export_hf
from compass_jax.weights.start import restore_params


class Run(Mapping[str, Any]):
    """A run directory. As a mapping it has the metrics of the last step, "steps" (the number of
    steps done), and the "evaluation" of a finished run.

    Files are read at each access, so the object follows a run in training. Raises ConfigError for a
    folder that is not a run directory.
    """

    def __init__(self, directory: str | os.PathLike, result: JsonMapping | None = None):
        self.directory = Path(directory)
        self._result = result
        self._params: tuple[int, Tree] | None = None  # of a step
        self._decoder: tuple[int, Engine, Tree] | None = None
        if result is None:
            read_config(self.directory)

    def __getitem__(self, name: str) -> Any:
        return self._values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r}, steps={self.get('steps', 0)})"

    def _values(self) -> JsonObject:
        series = self._series()
        last = max((int(steps[-1]) for steps, _ in series.values()), default=0)
        values: JsonObject = {
            name: float(column[-1]) for name, (steps, column) in series.items() if steps[-1] == last
        }
        if self._result:
            return values | dict(self._result)
        evaluation = read_object(self.directory / EVALUATION).get("metrics")
        return values | {"steps": last} | ({"evaluation": evaluation} if evaluation else {})

    def _series(self) -> Series:
        """Returns the series of the stage that was logged last; empty before the first step."""
        log = self.directory / "metrics.jsonl"
        stages = list(read_stages(log).values()) if log.is_file() else []
        return stages[-1] if stages else {}

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """The logged metrics as columns of equal length, "step" first: NaN where a step lacks one.
        matplotlib and pandas.DataFrame take them. A step that was logged twice has its last values.
        """
        series = self._series()
        steps = np.unique(np.concatenate([np.zeros(0, int), *(x for x, _ in series.values())]))
        columns = {"step": steps}
        for name, (at, values) in series.items():
            columns[name] = np.full(len(steps), np.nan)
            columns[name][np.searchsorted(steps, at)] = values
        return columns

    def samples(self, step: int | None = None) -> list[JsonObject]:
        """Returns the logged groups of a step (None: of the last one): each has the prompt, the
        reference "answer", the label, and "samples" with response, reward and tokens. log.groups
        is the number of groups that a step logs.

        Raises ReportError, with the logged steps, for a step without groups.
        """
        groups = list(read_groups(self.directory))
        steps = sorted({group["step"] for group in groups})
        if not steps:
            raise ReportError(f"{self.directory}: no step has been logged yet")
        if step is None:
            step = steps[-1]
        if step not in steps:
            logged = f"{steps[0]} to {steps[-1]}"
            raise ReportError(f"{self.directory}: step {step} has no samples; logged are {logged}")
        return [group for group in groups if group["step"] == step]

    def report(self, out: str | os.PathLike = "") -> Path:
        """Prints the run's table, writes its page, and returns the page's path: `out`, or
        report.html in the run's directory.
        """
        return run_report([self.directory], str(out))

    def export(self, folder: str | os.PathLike) -> Path:
        """Writes the newest checkpoint as a new Hugging Face folder and returns its path."""
        with NewFolderLock(folder):
            return export_hf(self.directory, Path(folder))

    @property
    def params(self) -> Tree:
        """The parameters of the newest checkpoint, adapters merged, loaded at the first use; their
        average if the run keeps one (optim.average).
        """
        step = self._newest()
        if self._params is None or self._params[0] != step:
            self._params = None  # frees the older ones first
            self._params = step, restore_params(self.directory)[0]
        return self._params[1]

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """Returns the answer of the newest checkpoint to a question, or to a conversation in chat
        messages, with the run's chat template, system prompt and longest answer.

        The first call loads the weights and compiles. Raises DataError for a value that is
        no prompt, and ConfigError for a prompt that does not fit into the model's context.
        """
        config = read_config(self.directory)
        tokenizer = load_tokenizer(config.data, config.model.vocab_size)
        text, messages = asked_of(list(prompt) if isinstance(prompt, tuple) else prompt, "prompt")
        chat = with_system_prompt(messages, config.data.system_prompt)
        tokens = np.asarray(tokenizer.encode_chat(chat), np.int32)
        run = config.policy, config.data, config.seed
        engine, weights = self._decoder_for(*run, len(tokens))
        question = Prompt(stable_id(text), 0, "", text, tokens, "")
        sampler = Sampler(temperature)
        options: JsonObject = {"sampler": sampler, "keep_routes": False}
        settings = 1, Purpose.EVAL, seed
        (rollout,) = Collection(engine, weights, [question], *settings, **options)
        return turns_of(tokenizer, engine.config).response(rollout)

    def _decoder_for(
        self, policy: PolicyConfig, data: DataConfig, seed: int, tokens: int
    ) -> tuple[Engine, Tree]:
        """Returns an engine for a prompt of this length, and the newest weights in its layout."""
        step = self._newest()
        if self._decoder is None or tokens > self._decoder[1].config.prompt_buckets[-1]:
            self._decoder = None
            small = _for_one_prompt(policy, tokens)
            engine, weights, _ = decoder_of(small, data, seed, str(self.directory))
            self._decoder = step, engine, weights
        elif self._decoder[0] != step:
            engine = self._decoder[1]
            small = _for_one_prompt(policy, engine.config.prompt_buckets[-1])
            weights = decoding_weights(small, seed, str(self.directory), engine)
            self._decoder = step, engine, weights
        return self._decoder[1:]

    def _newest(self) -> int:
        return checkpoint.read_manifest(self.directory).step


def _for_one_prompt(policy: PolicyConfig, tokens: int) -> PolicyConfig:
    """Returns the configuration of an engine that answers one prompt of this length at a time."""
    longest = policy.model.max_positions - policy.rollout.max_new_tokens
    if tokens > longest:
        raise ConfigError(
            f"the prompt has {tokens} tokens: at most {longest} fit into the model's context of"
            f" {policy.model.max_positions} beside an answer of {policy.rollout.max_new_tokens};"
            " shorten it"
        )
    mesh = policy.sampling_mesh
    mesh = mesh if mesh.devices <= jax.device_count() else MeshConfig()
    buckets = policy.rollout.prompt_buckets
    if tokens > buckets[-1]:
        buckets = (*buckets, min(2 ** (tokens - 1).bit_length(), longest))
    rollout = replace(policy.rollout, slots=mesh.devices, prompt_buckets=buckets, cache_pages=0)
    return replace(policy, mesh=mesh, rollout_mesh=None, rollout_apart=False, rollout=rollout)
