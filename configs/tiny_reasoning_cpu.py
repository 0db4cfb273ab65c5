"""Tiny reasoning model on a laptop CPU: a cold start on short answers and a few worked solutions,
then RL on tasks of mixed difficulty.

    compass sft   configs/tiny_reasoning_cpu.py
    compass train configs/tiny_reasoning_cpu.py         starts from that SFT

Metric: eval/heldout/avg_at_k on 520 held-out prompts. benchmarks/HISTORY.md has its values before
and after RL, and the minutes.
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
    ShapingConfig,
    ZeroVarianceConfig,
)
from compass_jax.rl.objectives.espo import Espo

TOKENIZER = str(Path(__file__).resolve().parent / "tiny_tokenizer")


def _sums(terms: int, digits: int, size: int, repeat: int = 1) -> ProceduralSource:
    """Returns sums and differences of `terms` numbers of `digits` digits: from too easy (2x1) to
    too hard (3x2).
    """
    options = (
        ("min_terms", terms),
        ("max_terms", terms),
        ("min_digits", digits),
        ("max_digits", digits),
    )
    return ProceduralSource("chain_sum", options, size, f"sum_{terms}x{digits}", repeat=repeat)


def _cold_start() -> SFTConfig:
    """Returns the SFT of the cold start. A fourth of the examples are worked solutions, the others
    bare answers to few questions: the cold start shows both ways, and RL learns which of them is
    rewarded.
    """
    return SFTConfig(
        procedural=(
            ("sum_2x1", 60, 4),
            ("sum_3x1", 600, 1),
            ("sum_4x1", 700, 1),
            ("sum_5x1", 700, 1),
        ),
        answers=(
            ("sum_2x1", 25, 48),
            ("sum_3x1", 240, 6),
            ("sum_4x1", 240, 6),
            ("sum_5x1", 200, 6),
            ("sum_6x1", 60, 6),
            ("sum_3x2", 30, 12),
            ("product_2x2", 5, 60),
        ),
        steps=1500,
        batch=36,
        buckets=(48, 96),
        micro_batch_tokens=1536,
        optim=OptimConfig(learning_rate=2e-3, warmup_steps=20, schedule="cosine", weight_decay=0.1),
        save_every=500,
    )


def tiny_reasoning_cpu() -> RunConfig:
    """Trains 8 experts, top-2, 4 layers, 1.9M parameters; ESPO with router replay R3; curriculum,
    growth, shaping and RL-ZVP against groups without variance.
    """
    return RunConfig(
        name="tiny_reasoning_cpu",
        model=ModelConfig(
            family="qwen3_moe",
            vocab_size=384,
            hidden=128,
            layers=4,
            heads=4,
            kv_heads=2,
            head_dim=32,
            ffn=256,
            moe=MoEConfig(experts=8, top_k=2, ffn=128),
            rope_theta=10_000.0,
            max_positions=256,
            init_std=0.05,
        ),
        compute=ComputeConfig(scan_layers=False),
        rollout=RolloutConfig(
            slots=128, prompt_buckets=(48,), max_new_tokens=64, tokens_per_call=16, cache_bucket=32
        ),
        data=DataConfig(
            sources=(
                _sums(2, 1, 200, repeat=8),
                _sums(3, 1, 2000),
                _sums(4, 1, 2000),
                _sums(5, 1, 1500),
                _sums(6, 1, 400),
                _sums(3, 2, 400, repeat=2),
                ProceduralSource(
                    "products", (("min_digits", 2), ("max_digits", 2)), 80, "product_2x2", repeat=10
                ),
            ),
            heldout_frac=0.3,
            eval_prompts=520,
            tokenizer=TOKENIZER,
        ),
        rewards=RewardConfig(workers=1, timeout_s=5.0),
        sft=_cold_start(),
        rl=RLConfig(
            steps=40,
            prompts_per_step=48,
            group_size=8,
            updates_per_rollout=2,
            replay="R3",
            buckets=(48, 80, 112),
            micro_batch_tokens=4096,
            objective=Espo(),
            step_policy=None,
            shaping=ShapingConfig(length_penalty=0.02, length_free_tokens=40),
            zero_variance=ZeroVarianceConfig(rl_zvp=True, curriculum=True, grow_to=16),
            optim=OptimConfig(learning_rate=3e-4, warmup_steps=2, schedule="cosine"),
            save_every=20,
        ),
        evaluation=EvalConfig(k=4),
    )
