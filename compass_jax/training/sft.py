"""Supervised fine-tuning on worked solutions: loss on the assistant's tokens, load-balancing loss
for the router, length buckets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.base.records import TrainState
from compass_jax.config import RunConfig
from compass_jax.config.io import to_plain
from compass_jax.data.packing import packed, padded
from compass_jax.data.stream import Workers
from compass_jax.data.streamed import (
    ExampleStream,
    StreamedExamples,
    sft_records,
    work_in_words,
)
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.devices import distributed
from compass_jax.devices.distributed import is_main_process
from compass_jax.devices.machine import peak_bytes
from compass_jax.devices.sharding import fetch, placements
from compass_jax.model.params import (
    in_layout,
    place,
    placed_structs,
    stack,
    training_layout,
)
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.rewards.checks import code_of
from compass_jax.rl.bucketing import MicroBatch, plan, take_rows
from compass_jax.rl.diagnostics import Diagnostics, finalize_diagnostics, merge_diagnostics
from compass_jax.runs.machine import record_machine
from compass_jax.runs.profile import check_steps, traced
from compass_jax.runs.rundir import RunDir
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training import optim, step, trained
from compass_jax.training.header import describe_model, header, sft_method
from compass_jax.training.memory import memory_line
from compass_jax.training.rate_notices import moved_schedule
from compass_jax.training.session import (
    RunState,
    carry_tokenizer,
    newest_checkpoint,
    open_run,
    stall_s,
    with_date,
)
from compass_jax.training.stops import TrainingStopped, stoppable
from compass_jax.weights import checkpoint
from compass_jax.weights.adapters import adapter_meta, check_base
from compass_jax.weights.checkpoint import Checkpoints
from compass_jax.weights.start import VOCAB_ROWS, first_parameters, vocab_rows


class SFTTrainer:
    """The state of one run. `steps()` yields each update's metrics; `save()` writes a checkpoint.

    Another kind of examples is a subclass with its STAGE, `examples`, `micro_batches` and
    `gradients` (training/scalar.py).
    """

    STAGE = "sft"

    def __init__(self, config: RunConfig, stop: RunState, telemetry: Telemetry):
        self.config, self.sft, self.stop, self.telemetry = config, config.sft, stop, telemetry
        self.tokenizer = load_tokenizer(config.data, config.model.vocab_size)
        placement = placements(config.mesh, None, False)[0]
        self.model = Transformer(
            config.model,
            config.compute,
            training_layout(config.compute),
            placement,
            self.tokenizer.vocab_size,
        )
        examples, self.data_stats = self.examples()
        team = Workers(jax.process_index(), jax.process_count(), distributed.all_gather_bytes)
        read_ahead = 2 * self.sft.batch
        self.stream = ExampleStream(examples, config.seed, self.sft.weights, team, read_ahead)
        state = self.stream.state()
        distributed.require_equal_across_processes(
            {f"the data's {name}": state[name] for name in ("items", "fingerprint")},
            "every process must find the same files",
        )
        self.checkpoints = Checkpoints(config.directory, config.model, config.keep_checkpoints)
        self.done_steps = 0
        self._restore_or_start()

    def examples(self) -> tuple[Sequence[Tree] | StreamedExamples, dict[str, int]]:
        """Returns the training examples, and the counts of their reading (see `sft_records`)."""
        return sft_records(self.sft, self.config.scored, self.tokenizer, self.telemetry.note)

    def _restore_or_start(self) -> None:
        config, directory, placement = self.config, self.config.directory, self.model.placement
        saved = newest_checkpoint(directory, self.telemetry.note)
        first = config.init_from, config.seed
        if saved is None:
            params = first_parameters(*first, self.model, self.telemetry.note)
            self.vocab_rows = vocab_rows(
                config.init_from, config.model.family, self.tokenizer.vocab_size
            )
            key = jax.random.fold_in(jax.random.key(config.seed), trained.ADAPTERS)
            tree, self.frozen = trained.split(config.lora, self.model, params, key)
            self.state: TrainState = place(
                optim.init_state(tree, self.sft.optim, self.sft.steps), config.model, placement
            )
            # Drops the lines of a run that was killed before its first checkpoint.
            self.telemetry.restore(None)
            return

        def fresh():
            key = jax.random.key(0)
            params = init_params(config.model, config.compute, key)
            tree, _ = trained.split(config.lora, Transformer(config.model), params, key)
            return {"state": optim.init_state(tree, self.sft.optim, self.sft.steps)}

        abstract = placed_structs(jax.eval_shape(fresh), config.model, placement)
        # A checkpoint of adapters does not have their base.
        self.frozen = first_parameters(*first, self.model) if config.lora.acts else None
        if self.frozen is not None:
            check_base(saved.path, saved.meta(), self.frozen)
        self.done_steps, arrays, meta = checkpoint.restore(saved, abstract, model=config.model)
        self.state = place(in_layout(arrays["state"], self.model.layout), config.model, placement)
        self.vocab_rows = meta.get(VOCAB_ROWS, config.model.vocab_size)
        self.stream.restore(meta["stream"])
        self.telemetry.restore(meta["telemetry"])

    @property
    def params(self) -> Tree:
        """The model's parameters, with adapters in their places."""
        return trained.full(self.config.lora, self.state.params, self.frozen)

    def header(self) -> list[str]:
        """Returns the run's first lines."""
        config = self.config
        lines = header(
            describe_model(config.model, sum(x.size for x in jax.tree.leaves(self.params))),
            config.init_from,
            (config.mesh, config.rollout_mesh),
            config.directory,
            work_in_words(self.data_stats),
            self.done_steps,
            self.sft.steps,
            memory_line(config.policy, self.sft),
            sft_method(self.sft),
        )
        return [config.name, *lines]

    def save(self, *, wait: bool = True) -> None:
        """Writes checkpoint `done_steps`; in the background unless `wait`."""
        self.telemetry.phase("saving")
        meta = {
            "kind": self.STAGE,
            VOCAB_ROWS: self.vocab_rows,
            **adapter_meta(self.config.lora, self.config.init_from, self.frozen),
            "stream": self.stream.state(),
            "telemetry": self.telemetry.state(),
        }
        self.checkpoints.save(self.done_steps, {"state": stack(self.state)}, meta, wait=wait)

    def steps(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Runs the remaining updates; yields (step, metrics) after each."""
        while self.done_steps < self.sft.steps and not self.stop.interrupted:
            started = time.perf_counter()
            self.telemetry.phase("training")
            before = self.stream.state()
            examples = self.stream.next_batch(self.sft.batch)
            data_s = time.perf_counter() - started
            try:
                diagnostics, applied = self._update(examples)
            except TrainingStopped:
                # The update did not happen, so its examples come again in the resumed run.
                self.stream.restore(before)
                return
            optim.check_divergence(
                int(self.state.bad_steps), self.sft.optim.max_bad_steps, self.config.directory
            )
            self.done_steps += 1
            metrics = {
                name: float(x)
                for name, x in fetch({**finalize_diagnostics(diagnostics), **applied}).items()
            }
            metrics[f"{self.STAGE}/loss"] = metrics.pop("loss")
            tokens = sum(e.size for e in examples)
            yield (
                self.done_steps,
                {
                    **metrics,
                    "train/tokens_per_s": tokens / (time.perf_counter() - started),
                    "time/step_s": time.perf_counter() - started,
                    "time/data_s": data_s,
                    "epoch": self.stream.epoch,
                    "memory/peak_gib": peak_bytes() / 2**30,
                    **self.stream.metrics(),
                },
            )

    def micro_batches(self, examples: Sequence[Tree]) -> Iterator[tuple[Tree, ...]]:
        """Yields the arguments of `gradients` for each micro-batch of an update: (tokens, lengths,
        weights, share of the weights, segments). All weights sum to 1: the loss is the mean over
        the batch's assistant tokens.
        """
        rows = (packed if self.sft.packing else padded)(examples, self.sft.buckets[-1])
        count = max(rows.learnt.sum(), 1.0)
        planned = self.planned(rows.lengths)
        for number, micro in enumerate(planned):
            self.telemetry.phase("training", number, len(planned))
            part = jax.tree.map(partial(take_rows, rows=micro.rows, length=micro.length), rows)
            share = jnp.float32(part.learnt.sum() / count)
            yield part.tokens, part.lengths, part.learnt / count, share, part.segments

    def gradients(self, *arrays: Tree) -> tuple[Tree, Diagnostics]:
        """Returns one micro-batch's part of the gradient, and its diagnostics."""
        *rows, segments = arrays
        aux_coef = self.sft.router_aux_coef
        return step.sft_gradients(self.model, self.params, *rows, aux_coef, segments)

    def planned(self, lengths: np.ndarray, rows: int = 1) -> list[MicroBatch]:
        """Returns micro-batches of examples with these lengths, each example with `rows` rows."""
        multiple = 1 if self.model.placement is None else self.model.placement.rows_multiple
        tokens = max(1, self.sft.micro_batch_tokens // rows)
        return plan(lengths, self.sft.buckets, tokens, rows_multiple=multiple)

    def _update(self, examples: Sequence[Tree]):
        """Runs one update, with its gradient summed over micro-batches."""
        total, parts = None, list[Diagnostics]()
        for arrays in stoppable(lambda: self.stop.interrupted, self.micro_batches(examples), parts):
            grads, diagnostics = self.gradients(*arrays)
            total = step.add(total, grads)
            del grads  # frees their memory before the next forward and backward
            tokens, lengths = arrays[:2]
            area = jnp.float32(tokens.size)
            parts.append({**diagnostics, "padding_frac": (area - jnp.float32(lengths.sum()), area)})
        self.state, applied = step.apply(
            self.state,
            total,
            config=self.sft.optim,
            total_steps=self.sft.steps,
            decays=trained.decay_mask(self.config.lora, self.model, self.state.params),
        )
        self.state = place(self.state, self.config.model, self.model.placement)
        return merge_diagnostics(parts), applied


def run_sft(
    config: RunConfig,
    lost_log: bool = False,
    kind: type[SFTTrainer] = SFTTrainer,
    profile_steps: tuple[int, ...] = (),
) -> JsonObject:
    """Trains until `sft.steps`, resuming the run directory; returns the last metrics.

    Args:
        lost_log: whether to continue if the logs lack lines that the checkpoint counts.
        kind: the trainer.
        profile_steps: the first and the last step of a profiler trace; empty: none.
    """
    config.validate()
    check_steps(profile_steps)
    optim.check_optimizer(config.sft.optim, config.sft.steps, "sft.optim")
    data = with_date(config.data, config.model.vocab_size, config.directory)
    config = replace(config, data=data)
    with (
        open_run(RunDir(config, code_of(data))) as run,
        RunState() as stop,
        Telemetry(
            config.directory,
            config.sft.steps,
            kind.STAGE,
            writes=is_main_process(),
            check=run.check,
            lost_log=lost_log,
            trackers=config.trackers,
            settings=to_plain(config),
            stall_s=stall_s(config.log),
            part_steps=config.log.part_steps,
        ) as telemetry,
    ):
        telemetry.phase("loading")
        trainer = kind(config, stop, telemetry)
        machine = record_machine(Path(config.directory)) if is_main_process() else []
        stage_before = getattr(run.before, "sft", None)
        moved = moved_schedule(stage_before, config.sft, trainer.done_steps)
        for line in [*machine, *trainer.header(), *filter(None, [moved])]:
            telemetry.note(line)
        carry_tokenizer(config.directory, config.data.tokenizer)
        with trainer.checkpoints, closing(trainer.stream):
            return _run(trainer, telemetry, stop, profile_steps) | {"status": stop.status}


def _run(
    trainer: SFTTrainer, log: Telemetry, stop: RunState, profile_steps: tuple[int, ...]
) -> JsonObject:
    sft, saved = trainer.sft, trainer.done_steps
    last: dict[str, float] = {}
    every = sft.save_every
    directory = trainer.config.directory
    for number, last in traced(
        trainer.steps(), lambda x: x[0], trainer.done_steps, profile_steps, directory, log.note
    ):
        log.log(number, last)
        if (every and number % every == 0) or number == sft.steps or stop.interrupted:
            trainer.save(wait=False)
            saved = number
    if trainer.done_steps != saved:
        trainer.save(wait=False)
    stopped = trainer.done_steps < sft.steps
    if stopped:
        log.note(f"stopped on request after step {trainer.done_steps}; the same command continues")
    return {"steps": trainer.done_steps, "stopped": stopped, "data": trainer.data_stats, **last}
