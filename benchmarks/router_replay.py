"""Experiment: what router replay is worth between a low-precision rollout and float32 training.

    python -m benchmarks.router_replay [--out runs/router_replay] [--seeds 0 1 2] [--only bf16
        causes ...] [--smollm2 | --smoke]

Cold start, recorded rollouts, causes of the gap, RL curves; a line per finished run in
OUT/router_replay.jsonl, so that the same command continues after a kill; at the end
OUT/router_replay.md and OUT/router_replay.png (benchmarks/router_replay_report.py).

**bf16, e4m3, int8**: a model of configs/router_replay_cpu.py samples in that precision (8 bits: the
weights, on top of bfloat16), and eight updates of RL with R3 follow on these samples. After 0, 1, 4
and 8 of them float32 training scores the samples with the weights of that moment in three ways:
`off` routes live, `R2` replays the routes of a float32 pass at the first weights, `R3` those of the
rollout. All three see the same weights, so they differ by the routes alone. Compared are
(algorithms: mean |difference|, k3, share of ratios beyond 2)
 - `now`: with the sampler at the same weights, by a pass over the recorded tokens. It shows how
   stale the recorded routes are: a fresh rollout would have this gap if it were given them. That
   pass is not the decoder: in bfloat16 it rounds and routes a little otherwise, which R3 feels;
   before the first update only `recorded` is the gap of a rollout.
 - `recorded`: with the log-probs of the rollout, which had the first weights; from update 1 on this
   holds the policy's own change too.
 - `drift`: with the same way at the first weights: the ratio that the objective sees. It is where
   R2 works: R2 is as far from the rollout as `off` is (both route live when the old log-probs are
   made) and keeps the routes fixed in between.
`flip_frac`: share of (token, layer) whose live top-k set is not the routes used; for `off`, not the
rollout's. **bf16_slow**: the same with a tenth of the learning rate, for the gap against the
distance of the weights. **causes**: the gap at equal weights with parts of the bfloat16 sampler
turned to float32 (compute.float32_parts), or the weights' rounding taken away by training at the
rounded weights; one part at a time, and one part alone in bfloat16. Sampled tokens are the same
throughout. **curve_off, curve_R3**: RL of the model of configs/tiny_reasoning_cpu.py from its cold
start, bfloat16 rollout, eight updates per rollout.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import experiments, rl_runs
from benchmarks.router_replay_report import write_report
from benchmarks.router_replay_setup import Setup, full, smoke, smollm2
from compass_jax.base.records import Group, StepArrays
from compass_jax.config import RunConfig
from compass_jax.data.prompts import train_prompts
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.devices.allocator import tune_allocator
from compass_jax.experience.assemble import assemble
from compass_jax.model.moe import unset_id
from compass_jax.model.params import param_specs
from compass_jax.model.quantize import emulate
from compass_jax.model.routes import put_routes
from compass_jax.model.transformer import Transformer
from compass_jax.rewards.score import Scorer
from compass_jax.rl.bucketing import MicroBatch, plan
from compass_jax.rl.correction import mismatch
from compass_jax.rl.diagnostics import finalize_diagnostics
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose
from compass_jax.runs.report import read_metrics
from compass_jax.training import optim, step
from compass_jax.training.learner import Learner
from compass_jax.training.rl import run_rl
from compass_jax.training.scored import device_rows, put_rows, sequences
from compass_jax.training.sft import run_sft
from compass_jax.weights.start import init_or_load
from compass_jax.weights.sync import sync_weights


def init_or_load_of(config, *args, **options):
    """Calls `init_or_load` with what it reads of a run's settings."""
    return init_or_load(config.init_from, config.model, config.compute, *args, **options)


PRECISIONS = {"bf16": "off", "e4m3": "e4m3", "int8": "int8", "bf16_slow": "off"}
CURVES = ("curve_off", "curve_R3")
VARIANTS = (*PRECISIONS, "causes", *CURVES)
PARTS = ("attention", "gate", "mlp", "stream")
_forward = jax.jit(step.forward, static_argnums=(0, 5))


@dataclass
class Recording:
    """One rollout: its samples as arrays with their routes, its micro-batches, and the number of
    ids that its tokenizer has.
    """

    arrays: StepArrays
    micros: list[MicroBatch]
    known: int


def record(config: RunConfig, params: Any) -> Recording:
    """Samples and scores one step's rollout in `config.rollout`'s precision."""
    tokenizer, rl = load_tokenizer(config.data, config.model.vocab_size), config.rl
    compute, known = config.policy.rollout_compute, tokenizer.vocab_size
    engine = Engine(config.model, compute, config.rollout, tokenizer.end_ids, known=known)
    decode, _ = sync_weights(params, config.model, compute.dtype, config.rollout.quantize)
    prompts = train_prompts(config.data, tokenizer, config.seed)
    prompts = [
        prompts[i]
        for i in np.random.default_rng(config.seed).permutation(len(prompts))[: rl.prompts_per_step]
    ]
    collection = Collection(engine, decode, prompts, rl.group_size, Purpose.TRAIN, config.seed)
    rollouts, scores = {}, {}
    with Scorer(config.rewards, config.data) as scorer:
        for rollout in collection:
            rollouts[rollout.row] = rollout
            scorer.submit(rollout.row, rollout.prompt, tokenizer.decode(rollout.response))
        while len(scores) < len(rollouts):
            scores.update(scorer.collect(block=True))
    rows = [range(n * rl.group_size, (n + 1) * rl.group_size) for n in range(len(prompts))]
    groups = [
        Group(p, tuple(rollouts[r] for r in row), tuple(scores[r] for r in row))
        for p, row in zip(prompts, rows, strict=True)
    ]
    ngram = rl.shaping.repetition_ngram
    arrays = assemble(groups, rl.group_size, rl.buckets[-1], ngram, collection.routes)
    size = len(rollouts) // rl.updates_per_rollout
    micros = [
        micro._replace(rows=np.where(micro.rows < 0, -1, micro.rows + first))
        for first in range(0, len(rollouts), size)
        for micro in plan(arrays.lengths[first : first + size], rl.buckets, rl.micro_batch_tokens)
    ]
    return Recording(arrays, micros, tokenizer.vocab_size)


def whole_pass(
    model: Transformer,
    params: Any,
    recording: Recording,
    store: jax.Array | None,
    temperature: float,
):
    """Returns (log-probs `[b t]`, routes used `[b t l k]`, flips per (token, layer)) of the
    recorded sequences; routes of `store`, None: live.
    """
    arrays, logp = recording.arrays, np.zeros_like(recording.arrays.rollout_logp)
    routes = jnp.full_like(arrays.routes, unset_id(arrays.routes.dtype))
    flips = counted = 0.0
    for micro in recording.micros:
        inputs = sequences(arrays, micro, store)
        micro_logp, _, used, aux = _forward(model, params, *inputs[:3], temperature)
        put_rows(logp, micro, micro_logp)
        routes = put_routes(routes, device_rows(micro, routes), used)
        flips, counted = flips + float(jnp.sum(aux.flips)), counted + float(jnp.sum(aux.tokens))
    return logp, routes, flips / counted


def gap(logp: np.ndarray, other: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Returns the four measures of rl/correction.py by their last names, with rho = exp(logp -
    other).
    """
    measures = jax.device_get(
        finalize_diagnostics(mismatch(jnp.asarray(logp), jnp.asarray(other), jnp.asarray(mask)))
    )
    return {name.removeprefix("mismatch/"): float(x) for name, x in measures.items()}


def flips_between(a: jax.Array, b: jax.Array) -> dict[str, Any]:
    """Returns the shares of (token, layer), of tokens in any layer, and of tokens in each layer
    whose sets of experts differ, over the tokens for which both have a route.
    """
    a, b = (np.sort(np.asarray(x), axis=-1) for x in (a, b))
    routed = (a[:, :, 0, -1] != unset_id(a.dtype)) & (b[:, :, 0, -1] != unset_id(b.dtype))
    differ = np.any(a != b, axis=-1)[routed]
    return {
        "flip_frac": float(differ.mean()),
        "flip_any_frac": float(differ.any(axis=-1).mean()),
        "flip_by_layer": [round(float(x), 5) for x in differ.mean(axis=0)],
    }


def distance(params: Any, first: Any) -> float:
    """Returns |params - first| / |first| over all weights."""
    return float(
        optim.global_norm(jax.tree.map(jnp.subtract, params, first)) / optim.global_norm(first)
    )


def measure(
    config: RunConfig, params: Any, recording: Recording, after: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Returns the points of one precision: after each of these numbers of updates, for off, R2 and
    R3.
    """
    arrays, temperature = recording.arrays, config.rollout.temperature
    model, sampler = (
        Transformer(config.model, compute, known=recording.known)
        for compute in (config.compute, config.policy.rollout_compute)
    )
    trained, learner = params, None
    if max(after):
        rl = dataclasses.replace(config.rl, steps=1, epochs=1, replay="R3")
        learner = Learner.start(
            dataclasses.replace(config, rl=rl).learner, model, jax.tree.map(jnp.copy, params)
        )
        scored, trained = learner.score(arrays), learner.state.params
    specs = param_specs(config.model)
    routes, first, points = {"off": None, "R2": None, "R3": arrays.routes}, {}, []
    for updates in range(max(after) + 1):
        if updates in after:
            low = emulate(trained, specs, config.rollout.quantize, sampler.compute.dtype)
            sampled, _, _ = whole_pass(sampler, low, recording, None, temperature)
            for mode in ("off", "R2", "R3"):
                # Recorded with live routing: this is the same pass as off, whose routes R2 replays
                # from now on.
                if mode == "R2" and not updates:
                    points.append({**points[-1], "mode": "R2", "flip_frac": 0.0})
                    first["R2"] = first["off"]
                    continue
                logp, used, flips = whole_pass(model, trained, recording, routes[mode], temperature)
                first.setdefault(mode, logp)
                point = {
                    "updates": updates,
                    "mode": mode,
                    "distance": distance(trained, params),
                    "flip_frac": flips,
                }
                if mode == "off":
                    point |= flips_between(used, recording.arrays.routes)
                    routes["R2"] = used if not updates else routes["R2"]
                point |= {
                    "now": gap(logp, sampled, arrays.mask),
                    "recorded": gap(logp, arrays.rollout_logp, arrays.mask),
                }
                points.append(
                    {**point, "drift": gap(logp, first[mode], arrays.mask)["logp_abs_diff"]}
                )
        if learner is not None and updates < max(after):
            learner.update(scored, learner.updates[updates])
            trained = learner.state.params
    return points


def cause_rows() -> list[tuple[str, tuple[str, ...], str]]:
    """Returns (name, parts of the sampler in float32, whose rounding of weights is taken away:
    none, router, all).
    """
    rows = [("all in bfloat16", (), "none"), ("weights in float32", (), "all")]
    rows += [(f"{part} in float32", (part,), "none") for part in PARTS]
    rows += [("attention, gate and stream in float32, equal weights", PARTS[:2] + PARTS[3:], "all")]
    rows += [("attention and stream in float32, equal weights", ("attention", "stream"), "all")]
    rows += [
        ("gate and router's weights in float32", ("gate",), "router"),
        ("only the weights in bfloat16", PARTS, "none"),
    ]
    rows += [
        (f"only {part} in bfloat16", tuple(p for p in PARTS if p != part), "all") for part in PARTS
    ]
    return [*rows, ("nothing in bfloat16", PARTS, "all")]


def round_weights(params: Any, which: str) -> Any:
    """Returns `params` with the weights that `which` names rounded to bfloat16 and kept in their
    type.
    """

    def leaf(path, w):
        chosen = which == "all" or (which == "router" and getattr(path[-1], "key", "") == "router")
        return w.astype("bfloat16").astype(w.dtype) if chosen else w

    return jax.tree_util.tree_map_with_path(leaf, params)


def causes(config: RunConfig, params: Any, recording: Recording) -> list[dict[str, Any]]:
    """Returns, for each row of `cause_rows`, the gap of live and of replayed training to that
    sampler, and how many (token, layer) it routes otherwise.
    """
    mask, temperature = recording.arrays.mask, config.rollout.temperature
    model, points, live = Transformer(config.model, config.compute, known=recording.known), [], {}
    for name, parts, exact in cause_rows():
        trained = round_weights(params, exact)
        if exact not in live:
            live[exact] = whole_pass(model, trained, recording, None, temperature)
        compute = dataclasses.replace(config.policy.rollout_compute, float32_parts=parts)
        sampler = Transformer(config.model, compute, known=recording.known)
        sampled, routes, _ = whole_pass(
            sampler,
            emulate(params, param_specs(config.model), "off", config.policy.rollout_compute.dtype),
            recording,
            None,
            temperature,
        )
        replayed, _, _ = whole_pass(model, trained, recording, routes, temperature)
        off, r3 = gap(live[exact][0], sampled, mask), gap(replayed, sampled, mask)
        points.append(
            {
                "cause": name,
                "float32_parts": parts,
                "weights_equal": exact,
                "off": off,
                "R3": r3,
                **flips_between(live[exact][1], routes),
            }
        )
    return points


class Runs:
    """The runs of one setup. Cold starts and recordings are made when a run first needs them."""

    def __init__(self, setup: Setup, out: Path, cold_starts: Path | None):
        self.setup, self.out, self.cold_starts = setup, out, cold_starts
        self.trained = cache(self._trained)
        self.recorded = cache(self._recorded)

    def _trained(self, seed: int) -> Any:
        config = self.setup.cold_start(seed, self.out)
        if run_sft(config)["stopped"]:
            raise SystemExit("stopped on request: the same command continues")
        return init_or_load_of(
            dataclasses.replace(config, init_from=config.run_dir), jax.random.key(0)
        )

    def _recorded(self, quantize: str, seed: int) -> Recording:
        return record(self.setup.replay("bf16", quantize, seed), self.trained(seed))

    def config(self, variant: str, seed: int) -> RunConfig:
        """Returns the configuration whose hash identifies a run."""
        if variant.startswith("curve_"):
            return self.setup.curve(variant.removeprefix("curve_"), seed, self.out)
        return self.setup.replay(variant, PRECISIONS.get(variant, "off"), seed)

    def run(self, variant: str, seed: int) -> dict[str, Any]:
        """Returns the result of one run."""
        config = self.config(variant, seed)
        if variant.startswith("curve_"):
            return self._curve(config)
        recording, params = self.recorded(config.rollout.quantize, seed), self.trained(seed)
        arrays = recording.arrays
        facts = {
            "response_tokens": int(arrays.mask.sum()),
            "reward_mean": float(arrays.reward.mean()),
        }
        if variant == "causes":
            return {**facts, "points": causes(config, params, recording)}
        return {**facts, "points": measure(config, params, recording, self.setup.updates)}

    def _curve(self, config: RunConfig) -> dict[str, Any]:
        if self.cold_starts is not None:
            weights = rl_runs.cold_start(0, self.cold_starts)
        else:
            start = self.setup.curve_cold_start(self.out)
            run_sft(start)
            weights = start.run_dir
        result = run_rl(dataclasses.replace(config, init_from=weights))
        if result["stopped"]:
            raise SystemExit("stopped on request: the same command continues")
        series = read_metrics(Path(config.run_dir) / "metrics.jsonl", "rl")
        names = (
            "reward/mean",
            "mismatch/logp_abs_diff",
            "mismatch/kl_k3",
            "mismatch/extreme_frac",
            "replay/flip_frac",
            "entropy_nats",
            "grad_norm",
        )
        curves = {name: [float(x) for x in series[name][1]] for name in names if name in series}
        return {
            "curves": curves,
            "avg_at_k": result["evaluation"].avg_at_k,
            "greedy": result["evaluation"].greedy,
        }


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = rl_runs.parser(
        __doc__, "router_replay", cold_starts="cold_starts", seeds=(0, 1, 2), variants=VARIANTS
    )
    parser.add_argument("--smollm2", action="store_true", help="an upcycled pretrained model")
    args = parser.parse_args(argv)
    out = Path(args.out)
    if args.smollm2:
        args.only = [x for x in args.only if x not in (*CURVES, "bf16_slow")]
    setup = smollm2(out) if args.smollm2 else smoke() if args.smoke else full()
    runs = Runs(setup, out, None if args.smoke else Path(args.cold_starts))
    path = out / "router_replay.jsonl"
    done = {(row["variant"], row["seed"], row["config"]) for row in experiments.finished(path)}
    chosen = [
        (seed, variant) for seed in args.seeds for variant in VARIANTS if variant in args.only
    ]
    for seed, variant in sorted(chosen, key=lambda run: run[1].startswith("curve_")):
        key = variant, seed, experiments.config_hash(runs.config(variant, seed))
        if key in done:
            print(f"{variant}, seed {seed}: done before", flush=True)
            continue
        started = time.perf_counter()
        result = runs.run(variant, seed)
        experiments.forget_compiled()
        row = dict(zip(("variant", "seed", "config"), key, strict=True)) | {
            "commit": experiments.commit(),
            "smoke": args.smoke,
        }
        experiments.append(
            path, {**row, "seconds": round(time.perf_counter() - started, 1), **result}
        )
        print(f"{variant}, seed {seed}: {time.perf_counter() - started:.0f} s", flush=True)
    write_report(experiments.finished(path), out)


if __name__ == "__main__":
    tune_allocator()
    main()
