"""Tiny reasoning model on a laptop CPU: SFT on a few worked solutions, then RL on procedural tasks of mixed difficulty.

    compass demo                                       everything below in one go, with evaluation and export
    compass sft   configs/tiny_reasoning_cpu.py        cold start
    compass train configs/tiny_reasoning_cpu.py --init-from runs/tiny_reasoning_cpu_sft
"""

from pathlib import Path

from compass_jax.config import (
    ComputeConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    MoEConfig,
    ObjectiveConfig,
    OptimConfig,
    ProceduralSource,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    SFTConfig,
)

TOKENIZER = str(Path(__file__).parent / "tiny_tokenizer")


def _sums(terms: int, digits: int, size: int) -> ProceduralSource:
    options = (("min_terms", terms), ("max_terms", terms), ("min_digits", digits), ("max_digits", digits))
    return ProceduralSource("chain_sum", options, size, f"sum_{terms}x{digits}")


def _words(shortest: int, longest: int, size: int) -> ProceduralSource:
    return ProceduralSource("spell_backward", (("min_word_len", shortest), ("max_word_len", longest)), size, f"spell_{shortest}-{longest}")


def tiny_reasoning_cpu() -> RunConfig:
    """8 experts, top-2, 4 layers, 1.9M parameters; ESPO with router replay R3 and RL-ZVP."""
    return RunConfig(
        name="tiny_reasoning_cpu",
        model=ModelConfig(
            family="qwen3_moe", vocab_size=384, hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=256,
            moe=MoEConfig(experts=8, top_k=2, ffn=128), rope_theta=10_000.0, max_positions=256, init_std=0.05,
        ),
        compute=ComputeConfig(scan_layers=False),
        rollout=RolloutConfig(slots=128, prompt_buckets=(48,), max_new_tokens=80, tokens_per_call=16, cache_bucket=32),
        data=DataConfig(
            sources=(
                _sums(2, 1, 200), _sums(3, 1, 3000), _sums(4, 1, 3000), _sums(2, 2, 3000), _sums(3, 2, 3000), _sums(5, 2, 3000), _sums(4, 3, 3000),
                _words(3, 4, 2000), _words(5, 6, 2000), _words(7, 8, 2000),
            ),
            heldout_frac=0.2, eval_prompts=640, tokenizer=TOKENIZER,
        ),
        rewards=RewardConfig(workers=1, timeout_s=5.0),
        sft=SFTConfig(
            procedural=(("sum_2x1", 60), ("sum_3x1", 100), ("sum_4x1", 60), ("sum_2x2", 100), ("sum_3x2", 60), ("spell_3-4", 60), ("spell_5-6", 60)),
            steps=400, batch=64, buckets=(64, 96, 128), micro_batch_tokens=8192, optim=OptimConfig(learning_rate=2e-3, warmup_steps=20, schedule="cosine"),
        ),
        rl=RLConfig(
            steps=120, prompts_per_step=32, group_size=8, updates_per_rollout=2, replay="R3", buckets=(64, 96, 128), micro_batch_tokens=8192,
            objective=ObjectiveConfig(name="espo"), optim=OptimConfig(learning_rate=1e-4, warmup_steps=5), save_every=20,
        ),
        evaluation=EvalConfig(k=4),
    )  # fmt: skip
