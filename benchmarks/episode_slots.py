"""How busy the slots are while the tools of many episodes work, and how many tokens the model
computes for each further turn.

    python -m benchmarks.episode_slots [--out runs/episode_slots]
        [--results benchmarks/results/episode_slots.jsonl] [--smoke]

64 episodes, of turns of 24 sampled and 16 given tokens, whose tool takes 0.5 s a turn
(slow_tool.py), by a mixture of experts of random weights. The plan, written before its runs:

busy: 8 turns over 16 slots, with and without rollout.hold_sessions. The share of the rollout's
    time in which a slot decodes: live slot-steps by slot-steps, times the share of the time in
    which not all episodes waited for tools. The goal is 0.8.
linear: 2, 4, 8, 16 turns over 64 slots, which hold every session; and without holding. The tokens
    that prefills compute, an episode. The goal: with holding, the first request and as many for
    every later turn.

Values are those of the second step; the first one compiles.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.experiments import append, commit, finished, forget_compiled
from benchmarks.slow_tool import OPENING, REPLY, TURN
from compass_jax.config import (
    ComputeConfig,
    DataConfig,
    EpisodeSource,
    EvalConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    ZeroVarianceConfig,
)
from compass_jax.training.rl import run_rl

RESULTS = Path(__file__).resolve().parent / "results" / "episode_slots.jsonl"
TOKENIZER = Path(__file__).resolve().parents[1] / "configs" / "tiny_tokenizer"
EPISODES, GROUP = 64, 4
CASES = [("busy", 8, 16, hold) for hold in (False, True)]
CASES += [("linear", turns, 64, hold) for turns in (2, 4, 8, 16) for hold in (True, False)]


def config(turns: int, slots: int, hold: bool, directory: Path, smoke: bool) -> RunConfig:
    """Returns the run of a case."""
    later = turns * (TURN + REPLY)
    length = -(-(OPENING + later) // 64) * 64
    prompts = 2 if smoke else EPISODES // GROUP
    width = 64 if smoke else 384
    return RunConfig(
        name="episode_slots",
        run_dir=str(directory),
        model=ModelConfig(
            family="qwen3_moe",
            vocab_size=384,
            hidden=width,
            layers=2 if smoke else 6,
            heads=6,
            kv_heads=2,
            head_dim=64,
            ffn=width,
            moe=MoEConfig(experts=8, top_k=2, ffn=width),
            max_positions=1024,
        ),
        compute=ComputeConfig(),
        rollout=RolloutConfig(
            slots=slots,
            prompt_buckets=(OPENING,),
            max_new_tokens=length - OPENING,
            tokens_per_call=8,
            cache_bucket=64,
            hold_sessions=hold,
        ),
        data=DataConfig(
            sources=(
                EpisodeSource(
                    f"{Path(__file__).with_name('slow_tool.py')}:SlowTool",
                    options=(("turns", turns),),
                    turns=turns,
                ),
            ),
            heldout_frac=0.1,
            eval_prompts=1,
            tokenizer=str(TOKENIZER),
        ),
        rl=RLConfig(
            steps=2,
            prompts_per_step=prompts,
            group_size=GROUP,
            buckets=(length,),
            micro_batch_tokens=length * 8,
            optim=OptimConfig(learning_rate=1e-5, warmup_steps=0),
            zero_variance=ZeroVarianceConfig(),
            eval_every=0,
        ),
        evaluation=EvalConfig(k=1),
    )


def measured(case: tuple[str, int, int, bool], out: Path, smoke: bool) -> dict[str, Any]:
    """Runs a case and returns its row."""
    kind, turns, slots, hold = case
    directory = out / f"{kind}_{turns}_{slots}_{hold}"
    shutil.rmtree(directory, ignore_errors=True)
    run_rl(config(turns, slots, hold, directory, smoke))
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(lines[-1])["metrics"]
    forget_compiled()
    seconds, waited = metrics["time/rollout_s"], metrics.get("time/environment_s", 0.0)
    episodes = GROUP * (2 if smoke else EPISODES // GROUP)
    return {
        "kind": kind,
        "turns": turns,
        "slots": slots,
        "hold": hold,
        "commit": commit(),
        "rollout_s": round(seconds, 2),
        "occupancy": round(metrics["rollout/slot_occupancy"], 4),
        "busy": round(metrics["rollout/slot_occupancy"] * (1 - waited / seconds), 4),
        "computed": round(metrics["rollout/prefill_tokens"] / episodes, 1),
    }


def main() -> None:
    """Runs the cases that have no row, and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/episode_slots"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    done = {(x["kind"], x["turns"], x["slots"], x["hold"]) for x in finished(arguments.results)}
    for case in CASES[: 2 if arguments.smoke else None]:
        if case not in done:
            append(arguments.results, measured(case, arguments.out, arguments.smoke))
    for row in finished(arguments.results):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
