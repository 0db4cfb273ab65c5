"""Shared parts of the configurations for pods: shapes of published models, and a run on 32k
tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from compass_jax.config.algorithm import ShapingConfig
from compass_jax.config.correction import named_correction
from compass_jax.config.data import DataConfig, FileSource, RolloutConfig
from compass_jax.config.judge import EngineJudgeConfig
from compass_jax.config.mesh import MeshConfig
from compass_jax.config.model import ComputeConfig, ModelConfig, MoEConfig
from compass_jax.config.objective import Objective
from compass_jax.config.rewards import RewardConfig
from compass_jax.config.run import RunConfig
from compass_jax.config.seam import seam_class
from compass_jax.config.training import RLConfig, ZeroVarianceConfig
from compass_jax.config.updates import OptimConfig

PROMPT, ANSWER = 2048, 30_720  # numbers of tokens, 32,768 in total
# Pairs of a token and an expert that a device receives at once in an MoE layer; it computes those
# of the experts that it holds, in the worst case all.
PAIRS = 131_072

QWEN3_30B_A3B = ModelConfig(
    family="qwen3_moe",
    vocab_size=151_936,
    hidden=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    ffn=6144,
    moe=MoEConfig(experts=128, top_k=8, ffn=768),
    max_positions=40_960,
)
QWEN3_235B_A22B = ModelConfig(
    family="qwen3_moe",
    vocab_size=151_936,
    hidden=4096,
    layers=94,
    heads=64,
    kv_heads=4,
    head_dim=128,
    ffn=12_288,
    moe=MoEConfig(experts=128, top_k=8, ffn=1536),
    max_positions=40_960,
)
# The shape of a published dense 7B model, close to that of arXiv 2508.08909, which gives no layer
# sizes.
QWEN2_7B = ModelConfig(
    family="qwen2",
    vocab_size=152_064,
    hidden=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    ffn=18_944,
    qk_norm=False,
    qkv_bias=True,
    max_positions=40_960,
)
# The size in arXiv 2512.07710 (245B parameters, 71B active, 16 experts, top-4); the paper gives no
# layer sizes, so these are this package's.
COMPASS_245B_A71B = ModelConfig(
    family="qwen3_moe",
    vocab_size=151_936,
    hidden=8192,
    layers=48,
    heads=96,
    kv_heads=8,
    head_dim=128,
    ffn=24_576,
    moe=MoEConfig(experts=16, top_k=4, ffn=12_288),
    max_positions=40_960,
)


def pod_run(
    name: str,
    model: ModelConfig,
    weights: str,
    mesh: MeshConfig,
    rollout_mesh: MeshConfig,
    *,
    slots: int,
    prompts: int = 64,
    exchange: Literal["gather", "all_to_all"] = "gather",
    remat_attention: bool = False,
    pairs: int = PAIRS,
    packed: bool = False,
    updates: int = 4,
) -> RunConfig:
    """Returns the RL run of `model` from the Hugging Face folder `weights`: 16 answers of up to
    30,720 tokens to each of `prompts` prompts, sampled with 8-bit weights.

    A micro-batch is one row of 32k tokens on each group of context devices. A checkpoint is saved
    every second step, which takes about five minutes or more by the plans' bounds, so a preemption
    loses at most two steps.

    Args:
        slots: number of sequences decoded together.
        exchange: exchange of tokens between the experts' devices. A gather over n devices receives
            n - 1 times a device's tokens, over links that are all busy. An all-to-all receives
            fewer (a quarter for 4 of 16 experts on 16 devices, two fifths for 8 of 128), over paths
            that share links: it pays if each token needs few of the devices.
        remat_attention: compute attention again in the backward pass; else its output is kept.
        pairs: pairs of a token and an expert at once on a device. Weight gradients are added once
            per chunk of this size, so a larger one saves time and takes memory.
        packed: sequences share rows of 32k tokens, up to four in a row. For many rows in a
            micro-batch: one of a shorter bucket would be mostly padding.
        updates: updates for each rollout.
    """
    rows = mesh.replica * mesh.fsdp * mesh.expert
    chunk = pairs // (mesh.expert * model.moe.top_k) if model.moe else 0
    return RunConfig(
        name=name,
        model=model,
        init_from=weights,
        mesh=mesh,
        rollout_mesh=rollout_mesh,
        compute=ComputeConfig(
            dtype="bfloat16",
            param_dtype="bfloat16",
            remat=True,
            remat_attention=remat_attention,
            scan_layers=True,
            scan_decode=True,
            moe_chunk=chunk,
            logprob_chunk=2048,
            exchange=exchange,
        ),
        rollout=RolloutConfig(
            slots=slots,
            prompt_buckets=(1024, PROMPT),
            max_new_tokens=ANSWER,
            tokens_per_call=64,
            cache_bucket=4096,
            prefill_chunk=PROMPT,
            quantize="auto",
        ),
        data=DataConfig(
            sources=(FileSource("data/train.jsonl"),), eval_prompts=256, tokenizer=weights
        ),
        rewards=RewardConfig(workers=8, timeout_s=10.0),
        rl=replace(
            _rl(prompts, rows, "R3" if model.moe else "off"),
            packed_row_tokens=PROMPT + ANSWER if packed else 0,
            updates_per_rollout=updates,
        ),
    )


def _rl(prompts: int, rows: int, replay: Literal["R3", "off"]) -> RLConfig:
    """Returns the recipe of arXiv 2512.07710 (docs/concepts/zero_variance.md, espo.md), with
    micro-batches of `rows` of the longest sequences.

    Prompts are drawn by their predicted pass rate. Those that `compass filter` measures as always
    right or always wrong are left out with `--data.keep-file OUT/pass_rates.jsonl`, which the user
    provides. Uniform groups grow to 32 samples. Penalties sum to 0.07, far below the difference of
    1 between right and wrong. The paper describes each of these stages; the numbers are this
    package's, except for ESPO's alpha. The rollout always starts the longest samples first, without
    a setting.
    """
    return RLConfig(
        steps=1000,
        prompts_per_step=prompts,
        group_size=16,
        replay=replay,
        buckets=(8192, 16_384, PROMPT + ANSWER),
        micro_batch_tokens=rows * (PROMPT + ANSWER),
        objective=seam_class(Objective, "espo")(),  # with its paper's alpha
        step_policy=None,
        correction=named_correction("tis"),
        shaping=ShapingConfig(
            length_penalty=0.05, length_free_tokens=ANSWER // 2, repetition_penalty=0.02
        ),
        zero_variance=ZeroVarianceConfig(rl_zvp=True, posterior=True, grow_to=32),
        optim=OptimConfig(learning_rate=1e-6, warmup_steps=10),
        save_every=2,
    )


# a question holds both answers, without their thoughts
JUDGE = EngineJudgeConfig("weights/judge", prompt_buckets=(2048, 8192), max_tokens=512, slots=128)


def phase_two(config: RunConfig, weights: str) -> RunConfig:
    """Returns the second phase of arXiv 2512.07710 ("domain expansion"), which starts from the
    first phase's `weights`.

    It adds questions of the domain, which a generative judge compares with a reference, to the
    prompts of the first phase. The judge, which `compass train-judge` made of the policy's model,
    runs on the rollout's devices between rollouts. Its verdicts are 0.5 apart
    (docs/howto/judge.md), still more than the penalties. Questions of the domain are repeated three
    times; this number is this package's.
    """
    domain = FileSource("data/domain.jsonl", verifier="judge", label="domain", repeat=3)
    return replace(
        config,
        name=f"{config.name}_phase2",
        init_from=weights,
        data=replace(config.data, sources=(*config.data.sources, domain)),
        rewards=replace(config.rewards, judge=JUDGE),
    )
