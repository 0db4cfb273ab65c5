"""Training and decoding of a mixture of experts on one GPU, compared with the chip's published
peaks.

    python -m benchmarks.gpu [--only products train replay decode] [--smoke] [--trace DIR]
                             [--out FILE]

`products` times one MoE layer's experts and one layer's attention in isolation, forward and with
gradient, for each implementation that the configuration offers. `train` times whole updates (AdamW
in float32, products in bfloat16, rematerialised layers) of the first layers of Qwen3-30B-A3B, four
of them on 80 GB, and counts MFU without the recomputation. `replay` generates with the engine and
scores the same tokens with the training's forward pass, with and without the recorded routes.
`decode` times the engine's token steps of the whole model in bfloat16 and counts the bytes that a
step must read: the experts that its tokens chose, all other weights and the live keys. Weights are
random and routing is live, so that an expert's load is that of an untrained router. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.config import ComputeConfig, ModelConfig, OptimConfig, RolloutConfig
from compass_jax.config.pods import QWEN3_30B_A3B
from compass_jax.devices.chips import chip_of
from compass_jax.model.attention import LayerCache, _causal
from compass_jax.model.experts.build import grouped_matmul, moe_ffn
from compass_jax.model.flops import forward_flops
from compass_jax.model.kernels import cudnn_causal
from compass_jax.model.params import abstract_params, decays, param_count, training_layout
from compass_jax.model.transformer import Transformer
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose, sample_keys
from compass_jax.training import optim, step

COMPUTE = ComputeConfig(dtype="bfloat16", remat=True, logprob_chunk=2048)
OPTIM = OptimConfig(learning_rate=1e-5, clip_grad_norm=1.0)


class Sizes(NamedTuple):
    """The size of each part."""

    model: ModelConfig
    layers: int  # layers of the trained model
    rows: int  # rows of a training step
    length: int
    slots: tuple[int, ...]
    prompt: int
    new_tokens: int
    steps: int


CARD = Sizes(QWEN3_30B_A3B, 4, 8, 2048, (128,), 128, 384, 5)
SMOKE = Sizes(
    replace(
        QWEN3_30B_A3B,
        vocab_size=256,
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=32,
        moe=replace(QWEN3_30B_A3B.mixture, experts=8, top_k=2, ffn=16),
    ),
    2,
    2,
    32,
    (4,),
    8,
    160,
    2,
)


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Returns the median wall time of a call, after a first call that is not counted."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def normal(tree: Any, seed: int = 0) -> Any:
    """Returns random arrays of the shapes and types of `tree`: vectors are 1, as norms begin,
    others have a standard deviation of 0.02.
    """

    @partial(jax.jit, static_argnums=(1, 2))
    def leaf(key, shape, dtype):
        return 0.02 * jax.random.normal(key, shape, dtype)

    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    arrays = [
        jnp.ones(x.shape, x.dtype) if x.ndim == 1 else leaf(key, x.shape, x.dtype)
        for key, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def products(sizes: Sizes) -> dict[str, Any]:
    """Times experts and attention in isolation, as in a training step of `sizes`."""
    config = sizes.model
    results: dict[str, Any] = {}
    for n, names in (
        (sizes.slots[-1], ("tokamax", "ragged")),
        (sizes.rows * sizes.length, ("tokamax",)),  # "ragged" would hold the rows of every expert
    ):
        for name in names:
            results[f"experts {name}, {n} tokens"] = _experts(config, name, n)
    keys = jax.random.split(jax.random.key(0), 2)
    b, t, d = sizes.rows, sizes.length, config.head_dim
    q = jax.random.normal(keys[0], (b, config.heads, t, d), jnp.bfloat16) * d**-0.5
    k = jax.random.normal(keys[1], (b, config.kv_heads, t, d), jnp.bfloat16)

    def portable(q, k, v):
        groups = q.reshape(b, config.kv_heads, -1, t, d)
        return _causal(groups, LayerCache(k, v), None)

    def cudnn(q, k, v):
        return cudnn_causal(q, k, v, None)

    flops = 2.0 * b * config.heads * t * t * d
    for name, attention in (("cudnn", cudnn), ("portable", portable)):
        results[f"attention {name}"] = _timed(attention, (q, k, k), flops, 3.5)
        print(json.dumps(results), file=sys.stderr, flush=True)
    return results


def _experts(config: ModelConfig, name: str, n: int) -> Any:
    """Times one layer's experts on `n` tokens, whose choices are uniform."""
    moe, keys = config.mixture, jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (n, config.hidden), jnp.bfloat16)
    scores = jax.random.normal(keys[1], (n, moe.experts))
    gates, ids = jax.lax.top_k(jax.nn.softmax(scores), moe.top_k)
    matrix = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    into, down = (moe.experts, config.hidden, moe.ffn), (moe.experts, moe.ffn, config.hidden)
    weights = normal({"gate": matrix(into), "up": matrix(into), "down": matrix(down)})

    def experts(x, weights):
        mask = jnp.ones((n,), bool)
        return moe_ffn(x, ids.astype(jnp.int32), gates, mask, weights, grouped_matmul(name))

    return _timed(experts, (x, weights), 6.0 * n * moe.top_k * config.hidden * moe.ffn)


def _timed(
    function: Callable[..., Any], inputs: tuple[Any, ...], flops: float, passes: float = 3.0
) -> Any:
    """Returns milliseconds and TFLOP/s of the forward pass, and of the forward and backward pass
    together, counted as `passes` forward passes; or the error of an implementation that this
    machine does not run.
    """
    grad = jax.grad(lambda *x: jnp.sum(function(*x).astype(jnp.float32)), range(len(inputs)))
    try:
        alone = seconds(partial(jax.jit(function), *inputs), 5)
        with_gradient = seconds(partial(jax.jit(grad), *inputs), 3)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:120]}"}
    return {
        "ms": round(1e3 * alone, 3),
        "tflops": round(flops / alone / 1e12, 1),
        "with_gradient_ms": round(1e3 * with_gradient, 3),
        "with_gradient_tflops": round(passes * flops / with_gradient / 1e12, 1),
    }


def train(sizes: Sizes, trace: Path | None) -> dict[str, Any]:
    """Times whole updates; MFU counts a forward pass and twice as much for the gradient."""
    config = replace(sizes.model, layers=sizes.layers)
    model = Transformer(config, COMPUTE, training_layout(COMPUTE))
    state = optim.init_state(normal(abstract_params(config, "float32", model.layout)), OPTIM, 1000)
    tokens = jax.random.randint(
        jax.random.key(1), (sizes.rows, sizes.length), 0, config.vocab_size, jnp.int32
    )
    lengths = jnp.full((sizes.rows,), sizes.length, jnp.int32)
    weight = jnp.full(tokens.shape, 1.0 / tokens.size).at[:, 0].set(0.0)
    losses = []

    def gradients():
        return step.sft_gradients(
            model, state.params, tokens, lengths, weight, jnp.float32(1.0), 0.0
        )

    def one():
        nonlocal state
        grads, metrics = gradients()
        state, _ = step.apply(
            state, grads, config=OPTIM, total_steps=1000, decays=decays(config, model.layout)
        )
        losses.append(metrics["loss"][0])
        return state

    start = time.perf_counter()
    jax.block_until_ready(one())
    first = time.perf_counter() - start
    repeats = bool(jax.jit(_equal)(gradients()[0], gradients()[0]))
    step_seconds = seconds(one, sizes.steps)
    with _traced(trace, "train"):
        jax.block_until_ready(one())
    flops = 3 * forward_flops(config, [sizes.length] * sizes.rows)
    return {
        "layers": config.layers,
        "parameters": param_count(config),
        "batch": [sizes.rows, sizes.length],
        "step_s": round(step_seconds, 4),
        "first_step_s": round(first, 1),
        "tokens_per_s": round(tokens.size / step_seconds, 1),
        "tflops": round(flops / step_seconds / 1e12, 1),
        **_share("mfu", flops / step_seconds, "bf16_tflops", 1e12),
        "gradient_repeats_bit_for_bit": repeats,
        "losses": [round(float(x), 4) for x in losses],
        "peak_gib": _peak_gib(),
    }


def _equal(a: Any, b: Any) -> Any:
    """Returns whether two trees are equal in every bit but the sign of zeros."""
    equal = jax.tree.map(lambda x, y: jnp.all(x == y), a, b)
    return jnp.all(jnp.stack(jax.tree.leaves(equal)))


def replay(sizes: Sizes) -> dict[str, Any]:
    """Returns the mean |log-prob of the engine - log-prob in training| of the same tokens in
    bfloat16, with the routes that training chooses and with those of the rollout.
    """
    config = replace(sizes.model, layers=sizes.layers)
    engine = _engine(config, sizes, sizes.slots[0])
    model = Transformer(config, COMPUTE, training_layout(COMPUTE))
    params = normal(abstract_params(config, "bfloat16", model.layout))
    tokens, lengths, logp, routes = _generate(engine, engine.load_params(params), sizes)
    generated = np.arange(tokens.shape[1])[None] >= sizes.prompt
    generated = generated & (np.arange(tokens.shape[1])[None] < lengths[:, None])
    gaps = {}
    for name, used in (("live", None), ("replayed", routes)):
        scored, _, chosen, _ = step.score(
            model, params, jnp.asarray(tokens), jnp.asarray(lengths), used, temperature=1.0
        )
        gap = np.abs(np.asarray(scored, np.float64) - logp)[generated]
        equal_sets = np.sort(np.asarray(chosen), -1) == np.sort(np.asarray(routes), -1)
        inputs = np.arange(tokens.shape[1])[None] < lengths[:, None] - 1
        gaps[name] = {
            "mean_abs_gap": float(gap.mean()),
            "max_abs_gap": float(gap.max()),
            "tokens_routed_otherwise": float(1 - equal_sets.all((-2, -1))[inputs].mean()),
        }
    gaps["ratio"] = gaps["live"]["mean_abs_gap"] / gaps["replayed"]["mean_abs_gap"]
    return {"tokens": int(generated.sum()), **gaps}


def _engine(config: ModelConfig, sizes: Sizes, slots: int) -> Engine:
    rollout = RolloutConfig(
        slots=slots,
        prompt_buckets=(sizes.prompt,),
        max_new_tokens=sizes.new_tokens,
        tokens_per_call=32,
        temperature=1.0,
    )
    compute = replace(COMPUTE, param_dtype="bfloat16", remat=False)
    return Engine(config, compute, rollout, end_ids=())


def _begin(engine: Engine, params: Any, sizes: Sizes) -> Any:
    """Returns a state whose slots hold different prompts of random tokens, and the prompts."""
    state, slots, at_once = engine.init_decode_state(), engine.config.slots, 8
    prompts = np.random.default_rng(0).integers(
        0, engine.model_config.vocab_size, (slots, sizes.prompt), np.int32
    )
    for first in range(0, slots, at_once):
        ids = np.arange(first, min(first + at_once, slots), dtype=np.uint32)
        zero = jnp.zeros(len(ids), jnp.uint32)
        prefix = engine.prefill_multisampling(
            params=params,
            padded_tokens=jnp.asarray(prompts[ids]),
            true_length=jnp.full(len(ids), sizes.prompt, jnp.int32),
            sampler=None,
            rng=sample_keys(0, Purpose.TRAIN, jnp.asarray(ids), zero, zero)[:, None],
            num_samples=1,
        )
        state = engine.bulk_insert(prefix, state, jnp.asarray(ids, jnp.int32)[:, None])
    return state, prompts


def _generate(engine: Engine, params: Any, sizes: Sizes) -> tuple[Any, ...]:
    """Returns (tokens `[b t]`, lengths, log-probs `[b t]`, routes `[b t l k]`) of one batch."""
    state, prompts = _begin(engine, params, sizes)
    rows: list[list[int]] = [list(x) for x in prompts]
    logp: list[list[float]] = [[0.0] * sizes.prompt for _ in prompts]
    routes = state.routes
    while np.asarray(state.live).any():
        state, results = engine.generate(params, state)
        routes = state.routes
        results = results.convert_to_numpy()
        for slot in range(len(rows)):
            slot_result = results.get_result_at_slot(slot)
            valid = slot_result.valid[0].astype(bool)
            rows[slot] += slot_result.tokens[0][valid].tolist()
            logp[slot] += results.logp[slot][valid].tolist()
    lengths = np.array([len(x) for x in rows], np.int32)
    width = routes.shape[1]
    pad = [np.pad(np.array(x), (0, width - len(x))) for x in rows]
    scores = [np.pad(np.array(x), (0, width - len(x))) for x in logp]
    routes = routes.reshape(*routes.shape[:2], -1, sizes.model.mixture.top_k)
    return np.stack(pad).astype(np.int32), lengths, np.stack(scores), routes


def decode(sizes: Sizes, trace: Path | None) -> dict[str, Any]:
    """Times token steps of the whole model at each number of slots."""
    engine = _engine(sizes.model, sizes, sizes.slots[0])
    params = normal(abstract_params(sizes.model, "bfloat16", engine.layout))
    jax.block_until_ready(params)
    return {
        "parameters": param_count(sizes.model),
        **{f"{slots} slots": _decode(sizes, slots, params, trace) for slots in sizes.slots},
        "peak_gib": _peak_gib(),
    }


def _decode(sizes: Sizes, slots: int, params: Any, trace: Path | None) -> dict[str, Any]:
    engine = _engine(sizes.model, sizes, slots)
    start = time.perf_counter()
    state, _ = _begin(engine, params, sizes)
    state, results = jax.block_until_ready(engine.generate(params, state))
    first = time.perf_counter() - start
    with _traced(trace, f"decode_{slots}_slots"):
        state, results = jax.block_until_ready(engine.generate(params, state))
    times, touched, config = [], [], sizes.model
    while np.asarray(state.live).all():
        start = time.perf_counter()
        state, results = jax.block_until_ready(engine.generate(params, state))
        steps = int(results.steps)
        times.append((time.perf_counter() - start) / steps)
        at = int(state.lengths[0]) - 2
        chosen = np.asarray(state.routes[:, at])  # [slots l*k]
        chosen = chosen.reshape(len(chosen), -1, config.mixture.top_k)
        layers = chosen.transpose(1, 0, 2).reshape(chosen.shape[1], -1)
        touched.append(np.mean([len(np.unique(x)) for x in layers]) / config.mixture.experts)
    token_seconds = statistics.median(times)
    experts = 2 * len(config.moe_layers) * 3 * config.hidden * config.mixture.ffn
    experts *= config.mixture.experts
    keys = 2 * config.layers * config.kv_heads * (config.head_dim + config.value_dim)
    length = sizes.prompt + sizes.new_tokens / 2
    embedding = 2 * config.vocab_size * config.hidden
    read = 2 * param_count(config) - embedding - experts * (1 - float(np.mean(touched)))
    read += slots * length * keys
    return {
        "token_ms": round(1e3 * token_seconds, 3),
        "tokens_per_s": round(slots / token_seconds, 1),
        "first_call_s": round(first, 1),
        "experts_read": round(float(np.mean(touched)), 3),
        "gib_read": round(read / 2**30, 2),
        "gb_per_s": round(read / token_seconds / 1e9, 1),
        **_share("of_bandwidth", read / token_seconds, "hbm_gb_s", 1e9),
    }


def _share(name: str, rate: float, peak: str, unit: float) -> dict[str, float]:
    """Returns the share of a published peak; empty for a chip that chips.py does not know."""
    chip = chip_of(jax.devices()[0].device_kind)
    return {} if chip is None else {name: round(rate / (getattr(chip, peak) * unit), 4)}


def _traced(folder: Path | None, name: str) -> Any:
    """Returns a context that profiles the code inside it, or one without effect if there is no
    folder.
    """
    return nullcontext() if folder is None else jax.profiler.trace(folder / name)


def _peak_gib() -> float | None:
    stats = jax.devices()[0].memory_stats()
    return round(stats["peak_bytes_in_use"] / 2**30, 2) if stats else None


PARTS = ("products", "train", "replay", "decode")


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each part, and all parts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--smoke", action="store_true", help="a toy model; no number means anything"
    )
    parser.add_argument("--trace", type=Path, help="folder for traces of train and decode")
    parser.add_argument("--out", type=Path, help="file that gets the last line")
    options = parser.parse_args(argv)
    parts: dict[str, Callable[[Sizes], dict[str, Any]]] = {
        "products": products,
        "train": partial(train, trace=options.trace),
        "replay": replay,
        "decode": partial(decode, trace=options.trace),
    }
    device = jax.devices()[0]
    result: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__}
    for name in options.only:
        start = time.perf_counter()
        result[name] = parts[name](SMOKE if options.smoke else CARD)
        result[name]["whole_part_s"] = round(time.perf_counter() - start, 1)
        print(json.dumps({name: result[name]}), flush=True)
        jax.clear_caches()
    line = json.dumps(result)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
