"""Shared parts of the benchmarks: the reference model with the same weights on both sides,
alternating rounds with a probe of the machine, the report.

The other side is transformers on torch, on the same CPU, in the same process and environment, with
the options that are fastest on this machine (`fastest`). A round times both sides once; the side
that goes first alternates. A plain matmul is timed before, between and after them; a round in which
it ran below `KEEP` of the best was disturbed and is dropped.

Measure on an otherwise idle machine: torch's threads wait for each other at every operator, so that
a neighbour on one core slows transformers down far more than it does XLA. The report has the share
of the processor that other processes took.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from benchmarks import experiments
from compass_jax.config import ModelConfig
from compass_jax.model.logprobs import head_weights, logits_of
from compass_jax.model.transformer import Transformer, apply
from compass_jax.weights.hf import load_params
from compass_jax.weights.hf_config import read_hf_config

KEEP = 0.7  # share of the best probe below which a round is dropped
LOGITS_ATOL = 2e-4
DEFAULT_ROUNDS = 9


@dataclass(frozen=True)
class Setup:
    """One size of the benchmark. `steps` optimiser steps make one timed part of the training
    benchmark.
    """

    model: Mapping[str, Any]
    train_rows: int
    train_length: int
    steps: int
    prompts: int
    prompt_length: int
    new_tokens: int
    tokens_per_call: int


def _qwen3_moe(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    experts: int,
    top_k: int,
    ffn: int,
    vocab: int,
) -> dict[str, Any]:
    return dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=ffn,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        output_router_logits=False,
        attention_dropout=0.0,
    )


REFERENCE = Setup(
    _qwen3_moe(256, 4, 8, 2, 16, 4, 256, 512),
    16,
    128,
    steps=4,
    prompts=64,
    prompt_length=16,
    new_tokens=128,
    tokens_per_call=32,
)
SMOKE = Setup(
    _qwen3_moe(32, 1, 4, 2, 4, 2, 16, 64),
    2,
    16,
    steps=1,
    prompts=4,
    prompt_length=4,
    new_tokens=8,
    tokens_per_call=4,
)


def arguments(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """Parses `--rounds` and `--smoke`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--rounds",
        type=int,
        default=DEFAULT_ROUNDS,
        help="timed rounds (default: %(default)s; fewer than 7 say little)",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a toy model: shows that the benchmark works, its numbers mean nothing",
    )
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1 is needed")
    return args


def cores() -> int:
    """Returns the number of processor cores that this process may use; XLA takes all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def say(text: str) -> None:
    """Prints progress on stderr; stdout is left to the report."""
    print(text, file=sys.stderr, flush=True)


def build_pair(setup: Setup, seed: int = 0) -> tuple[Any, ModelConfig, Any]:
    """Returns (torch model, our configuration, our stacked parameters). transformers initialises
    the weights randomly and saves a folder, from which ours are read.

    The head is scaled so that the logits have a standard deviation of 1: a comparison of smaller
    ones would hide differences.
    """
    torch.set_num_threads(cores())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("qwen3_moe", **setup.model), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        model.lm_head.weight.div_(model(torch.tensor(random_tokens(setup, (4, 16)))).logits.std())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = read_hf_config(folder)
        params = load_params(folder, config, "float32")
    return model, config, params


def random_tokens(setup: Setup, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns uniform token ids, int64 as torch requires."""
    return np.random.default_rng(seed).integers(0, setup.model["vocab_size"], shape)


def compare_logits(model: Any, config: ModelConfig, params: Any, setup: Setup) -> dict[str, float]:
    """Returns the largest difference of the two sides' logits, and their size. Raises SystemExit
    above LOGITS_ATOL, since then the sides do not compute the same.
    """
    tokens = random_tokens(setup, (4, setup.train_length), seed=1)
    with torch.no_grad():
        transformers_logits = model(torch.tensor(tokens)).logits.numpy()

    @jax.jit
    def forward(params, tokens):
        positions = jnp.broadcast_to(
            jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape
        )
        hidden = apply(
            Transformer(config), params, tokens, positions, mask=jnp.ones(tokens.shape, bool)
        ).hidden
        return logits_of(hidden, head_weights(params))

    difference = float(
        np.abs(
            np.asarray(forward(params, jnp.asarray(tokens, jnp.int32))) - transformers_logits
        ).max()
    )
    if not difference <= LOGITS_ATOL:
        raise SystemExit(
            f"logits of the two sides differ by {difference:.1e}, above {LOGITS_ATOL:.0e}: nothing"
            " was timed"
        )
    return {
        "logits_max_abs_diff": difference,
        "logits_atol": LOGITS_ATOL,
        "logits_std": float(transformers_logits.std()),
    }


def seconds(call: Callable[[], Any]) -> float:
    """Returns the wall time of one call, which must have finished its work when it returns."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def fastest(
    name: str, candidates: Mapping[str, Callable[[], Any]], repeats: int = 3
) -> tuple[str, dict[str, float]]:
    """Returns the candidate with the least time, and the best time of each in seconds. Each
    candidate runs once before, untimed; one that raises is left out.

    The candidates take turns and their best times are compared, so that a disturbance of the
    machine does not choose among them.
    """
    usable: dict[str, Callable[[], Any]] = {}
    for label, call in candidates.items():
        try:
            call()
            usable[label] = call
        except (RuntimeError, ValueError, NotImplementedError, ImportError) as error:
            say(f"  {name} {label}: not usable here ({type(error).__name__}: {str(error)[:100]})")
    if not usable:
        raise SystemExit(f"no candidate for {name} runs on this machine: {', '.join(candidates)}")
    durations: dict[str, list[float]] = {label: [] for label in usable}
    for _ in range(repeats):
        for label, call in usable.items():
            durations[label].append(seconds(call))
    times = {label: min(values) for label, values in durations.items()}
    say(", ".join(f"{name} {label}: {t:.3f} s" for label, t in times.items()))
    return min(times, key=times.__getitem__), times


def make_probe(size: int = 1024, repeats: int = 5) -> Callable[[], float]:
    """Returns a function that measures a plain float32 matmul [size size] x [size size] in GFLOP/s,
    the median of `repeats`.
    """
    a = jnp.asarray(np.random.default_rng(0).standard_normal((size, size)), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(a, a))

    def probe() -> float:
        times = [seconds(lambda: jax.block_until_ready(multiply(a, a))) for _ in range(repeats)]
        return 2 * size**3 / statistics.median(times) / 1e9

    return probe


def _cpu_seconds() -> tuple[float, float] | None:
    """Returns (processor time that the machine spent, that this process spent) in seconds, or None
    if the kernel does not report it.
    """
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    # idle and waiting for a disk; time stolen by other guests of the host counts as spent
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK"), time.process_time()


def _others_share(
    before: tuple[float, float] | None, after: tuple[float, float] | None, wall: float
) -> float | None:
    """Returns the share of the machine's processor time that other processes took between two
    readings.
    """
    if before is None or after is None:
        return None
    return max(0.0, (after[0] - before[0]) - (after[1] - before[1])) / (
        wall * (os.cpu_count() or 1)
    )


def run_rounds(
    run_compass: Callable[[], int],
    run_transformers: Callable[[], int],
    rounds: int,
    probe: Callable[[], float],
) -> list[dict[str, Any]]:
    """Times both sides once per round, alternately first. Each call returns the number of tokens
    that it processed; a round's probe is its slowest.
    """
    out = []
    for r in range(rounds):
        row: dict[str, Any] = {"first": "transformers" if r % 2 else "ours"}
        cpu, began = _cpu_seconds(), time.monotonic()
        probes = [probe()]
        for name, call in (("ours", run_compass), ("transformers", run_transformers))[
            :: -1 if r % 2 else 1
        ]:
            start = time.perf_counter()
            tokens = call()
            row[f"{name}_tokens_per_s"] = tokens / (time.perf_counter() - start)
            probes.append(probe())
        row["matmul_gflops"] = min(probes)
        row["others_cpu_share"] = _others_share(cpu, _cpu_seconds(), time.monotonic() - began)
        out.append(row)
        say(
            f"round {r + 1}/{rounds}: "
            + ", ".join(f"{k} {v:,.2f}" for k, v in row.items() if isinstance(v, float))
        )
    return out


def summarise(rounds: list[dict[str, Any]], flops: float) -> dict[str, Any]:
    """Returns the medians over the rounds whose probe is at least KEEP of the best; `ratio` is the
    ratio of the medians.

    flops: FLOPs of a token. A side's share of the matmul rate is the FLOPs of its tokens per second
    over the rate that the probe reached.
    """
    best = max(r["matmul_gflops"] for r in rounds)
    marked = [{**r, "kept": r["matmul_gflops"] >= KEEP * best} for r in rounds]
    undisturbed = [r for r in marked if r["kept"]]
    compass_rate, transformers_rate, matmul_rate = (
        statistics.median(r[k] for r in undisturbed)
        for k in ("ours_tokens_per_s", "transformers_tokens_per_s", "matmul_gflops")
    )
    return {
        "ours_tokens_per_s": round(compass_rate, 1),
        "transformers_tokens_per_s": round(transformers_rate, 1),
        "ratio": round(compass_rate / transformers_rate, 4),
        "matmul_gflops": round(matmul_rate, 1),
        "ours_matmul_share": round(compass_rate * flops / matmul_rate / 1e9, 4),
        "transformers_matmul_share": round(transformers_rate * flops / matmul_rate / 1e9, 4),
        "rounds": len(rounds),
        "rounds_dropped": len(rounds) - len(undisturbed),
        "others_cpu_share_max": max(
            (r["others_cpu_share"] for r in undisturbed if r.get("others_cpu_share") is not None),
            default=None,
        ),
        "per_round": [
            {k: round(v, 3) if isinstance(v, float) else v for k, v in r.items()} for r in marked
        ],
    }


def environment() -> dict[str, Any]:
    """Returns the machine, the versions, the commit and the settings that both sides share."""
    packages = ("jax", "jaxlib", "flax", "optax", "torch", "transformers", "numpy")
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "torch_threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "commit": experiments.commit(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def report(name: str, smoke: bool, *parts: Mapping[str, Any]) -> None:
    """Prints the result as one JSON line."""
    merged: dict[str, Any] = {"benchmark": name, "smoke": smoke}
    for part in parts:
        merged |= part
    print(json.dumps(merged), flush=True)
