"""The run that the faults disturb: 20,000 weights, prompts from a file. Its paths are relative,
since every case has a separate folder.
"""

from compass_jax.config import (
    ComputeConfig,
    DataConfig,
    EvalConfig,
    FileSource,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    SFTConfig,
    ZeroVarianceConfig,
)
from compass_jax.rl.objectives.grpo import Grpo


def tiny() -> RunConfig:
    """Returns a configuration with two layers of four experts and two RL steps, each saved."""
    return RunConfig(
        name="tiny",
        run_dir="run",
        model=ModelConfig(
            family="qwen3_moe",
            vocab_size=338,
            hidden=16,
            layers=2,
            heads=2,
            kv_heads=1,
            head_dim=8,
            ffn=16,
            moe=MoEConfig(experts=4, top_k=2, ffn=8),
            rope_theta=10_000.0,
            max_positions=256,
            init_std=0.1,
        ),
        compute=ComputeConfig(scan_layers=False),
        rollout=RolloutConfig(
            slots=4, prompt_buckets=(128,), max_new_tokens=8, tokens_per_call=4, cache_bucket=136
        ),
        data=DataConfig(
            sources=(FileSource("rows.jsonl"),),
            overlong="refuse",
            heldout_frac=0.0,
            eval_prompts=0,
            tokenizer="tokenizer",
        ),
        rewards=RewardConfig(answer_tag=""),
        sft=SFTConfig(
            files=("chats.jsonl",),
            steps=2,
            batch=4,
            buckets=(128,),
            micro_batch_tokens=512,
            optim=OptimConfig(learning_rate=1e-2),
            save_every=1,
        ),
        rl=RLConfig(
            steps=2,
            prompts_per_step=2,
            group_size=2,
            buckets=(136,),
            micro_batch_tokens=136 * 4,
            objective=Grpo(),
            step_policy=None,
            zero_variance=ZeroVarianceConfig(rl_zvp=True),
            optim=OptimConfig(learning_rate=1e-2),
            save_every=1,
        ),
        evaluation=EvalConfig(k=2, start=False),
    )
