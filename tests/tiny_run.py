"""A run that takes seconds, with real tasks, the real tokenizer and a model of 60,000 random
weights. It is also a configuration file for `compass train`."""

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
)
from compass_jax.rl.objectives.espo import Espo

TOKENIZER = str(Path(__file__).parent.parent / "configs" / "tiny_tokenizer")
_SUM = (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 1))


def tiny_run(verifier: str = "reasoning_gym") -> RunConfig:
    """Returns the run. The whole response is the answer, so that a random model is sometimes partly
    right.
    """
    return RunConfig(
        name="tiny_run",
        model=ModelConfig(
            family="qwen3_moe",
            vocab_size=384,
            hidden=32,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=8,
            ffn=32,
            moe=MoEConfig(experts=4, top_k=2, ffn=16),
            rope_theta=10_000.0,
            max_positions=128,
            init_std=0.1,
        ),
        compute=ComputeConfig(scan_layers=False),
        rollout=RolloutConfig(
            slots=8, prompt_buckets=(40,), max_new_tokens=16, tokens_per_call=4, cache_bucket=56
        ),
        data=DataConfig(
            sources=(ProceduralSource("chain_sum", _SUM, 60, "sum", verifier=verifier),),
            eval_prompts=4,
            tokenizer=TOKENIZER,
        ),
        rewards=RewardConfig(answer_tag=""),
        sft=SFTConfig(
            procedural=(("sum", 24, 1),),
            steps=3,
            batch=8,
            buckets=(104,),
            micro_batch_tokens=104 * 8,
            optim=OptimConfig(learning_rate=1e-2),
        ),
        rl=RLConfig(
            steps=2,
            prompts_per_step=4,
            group_size=4,
            buckets=(56,),
            micro_batch_tokens=56 * 8,
            objective=Espo(),
            step_policy=None,
            zero_variance=ZeroVarianceConfig(rl_zvp=True),
            optim=OptimConfig(learning_rate=1e-2),
            save_every=1,
        ),
        evaluation=EvalConfig(k=2, start=False),
    )
