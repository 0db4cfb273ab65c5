"""A comparison, bit for bit, of the training of two versions of the code: short runs of every kind,
recorded and compared.

    python -m benchmarks.same_metrics record DIR             two steps of each kind of run; --demo:
        `compass demo` too
    python -m benchmarks.same_metrics compare BEFORE AFTER   every metric but times and rates, and
        every sample

Both versions must run on one machine, since the matrix products of processors differ. The exit
status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rl.objectives.gspo import Gspo

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("PJRT_NPROC", "64")

TESTS = Path(__file__).parent.parent / "tests"
# also for the reward workers, which inherit PYTHONPATH
sys.path[:0] = [str(TESTS), str(TESTS / "training")]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])


def variants() -> dict[str, dict[str, Any]]:
    """Returns the settings of each run: fields of RLConfig, and under "run" those of RunConfig."""
    from compass_jax.config import (
        MeshConfig,
        ShapingConfig,
        ZeroVarianceConfig,
        named_correction,
    )

    tis, rollout = named_correction("tis"), {"slots": 6}
    dynamic = ZeroVarianceConfig(
        rl_zvp=False, dynamic_sampling=True, dynamic_batch=2, dynamic_rounds=3
    )
    shaping = ShapingConfig(length_penalty=0.05, repetition_penalty=0.02, repetition_ngram=2)
    partial = {"partial_prompts": 3, "correction": tis, "steps": 3, "rollout": rollout}
    off = {"one_step_off": True, "correction": tis, "steps": 3}
    return {
        "plain": {},
        "growth": {
            "zero_variance": ZeroVarianceConfig(rl_zvp=True, posterior=True, grow_to=12),
            "shaping": shaping,
            "correction": tis,
        },
        "dynamic": {"zero_variance": dynamic},
        "dynamic_growth": {"zero_variance": dataclasses.replace(dynamic, grow_to=8)},
        "partial": partial,
        "partial_off": {**partial, "one_step_off": True},
        "one_step_off": off,
        "dynamic_off": {**off, "zero_variance": dynamic},
        "r2": {"replay": "R2", "updates_per_rollout": 2},
        "off": {
            "replay": "off",
            "objective": Grpo(kl_coef=0.1),
            "updates_per_rollout": 2,
            "epochs": 2,
        },
        "gspo": {"objective": Gspo(), "updates_per_rollout": 2},
        "eight_bit": {"correction": tis, "rollout": {"quantize": "int8"}},
        "pages": {"rollout": {"cache_pages": 40, "page_tokens": 8}},
        "mesh": {
            "run": {"mesh": MeshConfig(fsdp=2, expert=2, tensor=2)},
            "objective": Grpo(),
        },
        "apart": {
            **off,
            "objective": Grpo(),
            "run": {
                "mesh": MeshConfig(fsdp=4),
                "rollout_mesh": MeshConfig(expert=2, tensor=2),
                "rollout_apart": True,
            },
        },
    }


def configured(directory: Path, rl: dict[str, Any], verifier: str = "reasoning_gym"):
    """Returns the configuration of one run."""
    from tiny_run import tiny_run

    config, rl = tiny_run(verifier), dict(rl)
    run, rollout = rl.pop("run", {}), dataclasses.replace(config.rollout, **rl.pop("rollout", {}))
    return dataclasses.replace(
        config,
        run_dir=str(directory),
        rollout=rollout,
        rl=dataclasses.replace(config.rl, **rl),
        **run,
    )


def record(out: Path, demo: bool, only: list[str]) -> None:
    """Runs everything into `out`."""
    from compass_jax.training.rl import run_rl
    from compass_jax.training.sft import run_sft

    if demo:
        from compass_jax.commands.demo import run_demo

        run_demo(str(out / "demo"))
    for name, rl in variants().items():
        if only and name not in only:
            continue
        print(f"== {name}", flush=True)
        verifier = "seldom" if "growth" in name or "dynamic" in name else "coin"
        run_rl(configured(out / name, rl, f"odd_verifiers:{verifier}"))
    if not only or "sft" in only:
        run_sft(configured(out / "sft", {}))


def rows(path: Path) -> list[Any]:
    """Returns the lines of a log without times and rates."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    for row in entries:
        row.pop("time", None)
        for name in list(row.get("metrics", {})):
            if name.startswith("time/") or name.endswith(("_s", "/mfu", "peak_gib")):
                del row["metrics"][name]
    return entries


def compare(before: Path, after: Path) -> int:
    """Prints the differences; returns the number of logs that differ."""
    logs = sorted(path.relative_to(before) for path in before.rglob("*.jsonl"))
    differ = 0
    for log in logs:
        if not (after / log).exists():
            print(f"{log}: not recorded after")
            differ += 1
            continue
        one, two = rows(before / log), rows(after / log)
        if one == two:
            print(f"{log}: equal, {len(one)} lines")
            continue
        differ += 1
        print(f"{log}: differs, {len(one)} and {len(two)} lines")
        for a, b in zip(one, two):
            names = {**a.get("metrics", {}), **b.get("metrics", {})}
            differences = [
                f"{n}: {a['metrics'].get(n)} {b['metrics'].get(n)}"
                for n in names
                if a["metrics"].get(n) != b["metrics"].get(n)
            ]
            if a != b:
                print(f"  step {a.get('step')}: {differences[:5] or 'a sample'}")
                break
    return differ


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    if options.action == "record":
        record(options.directories[0], options.demo, options.only)
        return 0
    return 1 if compare(*options.directories) else 0


if __name__ == "__main__":
    sys.exit(main())
