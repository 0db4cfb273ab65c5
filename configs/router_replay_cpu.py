"""Router replay on a laptop CPU: a deep mixture of small experts, big enough that routes of a
low-precision rollout flip.

    python -m benchmarks.router_replay          cold start, recorded rollouts, causes of the gap, RL
                                                curves, table and picture

Metric: mismatch/logp_abs_diff of recorded rollouts, with replay off, R2 and R3
(benchmarks/router_replay.py).
"""

from pathlib import Path

from compass_jax.config import (
    ComputeConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ProceduralSource,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    SFTConfig,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.rl.objectives.espo import Espo

TOKENIZER = str(Path(__file__).resolve().parent / "tiny_tokenizer")


def _sums(terms: int, digits: int, size: int) -> ProceduralSource:
    options = (
        ("min_terms", terms),
        ("max_terms", terms),
        ("min_digits", digits),
        ("max_digits", digits),
    )
    return ProceduralSource("chain_sum", options, size, f"sum_{terms}x{digits}")


def router_replay_cpu() -> RunConfig:
    """Trains 16 layers, 64 experts, top-8, 6.6M parameters, on the sums and with the tokenizer of
    tiny_reasoning_cpu; one rollout serves eight updates.
    """
    return RunConfig(
        name="router_replay_cpu",
        model=ModelConfig(
            family="qwen3_moe",
            vocab_size=384,
            hidden=64,
            layers=16,
            heads=4,
            kv_heads=2,
            head_dim=16,
            ffn=128,
            moe=MoEConfig(experts=64, top_k=8, ffn=32),
            rope_theta=10_000.0,
            max_positions=256,
            init_std=0.05,
        ),
        compute=ComputeConfig(scan_layers=True),
        rollout=RolloutConfig(
            slots=64, prompt_buckets=(48,), max_new_tokens=48, tokens_per_call=16, cache_bucket=32
        ),
        data=DataConfig(
            sources=(_sums(2, 1, 200), _sums(3, 1, 2000), _sums(4, 1, 2000)),
            heldout_frac=0.3,
            eval_prompts=120,
            tokenizer=TOKENIZER,
        ),
        rewards=RewardConfig(workers=1, timeout_s=5.0),
        sft=SFTConfig(
            procedural=(("sum_2x1", 100, 8), ("sum_3x1", 1200, 1), ("sum_4x1", 1200, 1)),
            steps=160,
            batch=32,
            buckets=(48, 96),
            micro_batch_tokens=4096,
            optim=OptimConfig(
                learning_rate=2e-3, warmup_steps=20, schedule="cosine", weight_decay=0.1
            ),
            save_every=80,
        ),
        rl=RLConfig(
            steps=1,
            prompts_per_step=16,
            group_size=8,
            updates_per_rollout=8,
            buckets=(64, 96),
            micro_batch_tokens=4096,
            objective=Espo(),
            step_policy=None,
            zero_variance=ZeroVarianceConfig(rl_zvp=True),
            optim=OptimConfig(learning_rate=3e-4),
            correction=named_correction("tis"),
        ),
        evaluation=EvalConfig(k=4),
    )
