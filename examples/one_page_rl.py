"""Reinforcement learning on one page: a Hugging Face folder in, a better one out.

    python examples/one_page_rl.py                       # makes a tiny model of random weights
    python examples/one_page_rl.py MODEL_FOLDER OUT --steps 20

`compass train` runs the same loop. This page uses only its three parts, the engine, the collection
of samples and the learner, and passes arrays between them, so that you can replace any line. The
comments "Left out" name the features of `compass train` that this page does without, and why.
"""

import argparse
import tempfile
from pathlib import Path

import jax
import numpy as np

from compass_jax.base.records import Prompt, Rollout, StepArrays
from compass_jax.config import (
    AlgorithmConfig,
    ComputeConfig,
    LearnerConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RolloutConfig,
    SamplingConfig,
    UpdatesConfig,
)
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose
from compass_jax.training.learner import Learner
from compass_jax.weights.hf import load_params, save_params
from compass_jax.weights.hf_config import read_hf_config

PROMPTS, SAMPLES, NEW_TOKENS, SEED = 4, 16, 16, 0
QUESTIONS = [f"What is {a} + {b}?" for a in range(1, 9) for b in range(1, 9)]
TOKENIZER = Path(__file__).parents[1] / "configs" / "tiny_tokenizer"


def reward_of(answer: str) -> float:
    """Returns the share of digits in an answer: what even random weights can learn in a minute.

    Left out: real verifiers. They run hostile text in sandboxed processes with a time limit
    (`compass_jax.rewards`); a function of a string needs neither.
    """
    text = answer.strip()
    return sum(x.isdigit() for x in text) / len(text) if text else 0.0


def make_tiny_model(folder: Path) -> Path:
    """Writes a Hugging Face folder with a mixture of four small experts of random weights."""
    shape = ModelConfig(
        family="qwen3_moe",
        vocab_size=384,
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn=32,
        moe=MoEConfig(experts=4, top_k=2, ffn=16),
        max_positions=128,
    )
    params = init_params(shape, ComputeConfig(), jax.random.key(SEED))
    return save_params(params, shape, folder, "float32", tokenizer_from=TOKENIZER)


def settings(prompt_tokens: int, learning_rate: float) -> LearnerConfig:
    """Returns the settings of the sampler and the learner.

    Left out: several updates in a rollout, a KL penalty, corrections, penalties on length and other
    objectives. Each is a setting here: objective=Espo(), correction=named_correction("tis").
    """
    # Programs have fixed shapes: prompts are padded to one length, sequences to another.
    longest = -(-prompt_tokens // 16) * 16
    return LearnerConfig(
        # R3: the updates replay the experts that the rollout chose, token by token.
        algorithm=AlgorithmConfig(objective=Grpo(), replay="R3"),
        updates=UpdatesConfig(
            buckets=(longest + NEW_TOKENS,), optim=OptimConfig(learning_rate=learning_rate)
        ),
        sampling=SamplingConfig(prompts_per_step=PROMPTS, group_size=SAMPLES),
        rollout=RolloutConfig(
            slots=PROMPTS * SAMPLES,
            prompt_buckets=(longest,),
            max_new_tokens=NEW_TOKENS,
            cache_bucket=16,
        ),
    )


def step_prompts(step: int, tokenizer: Tokenizer) -> list[Prompt]:
    """Returns the prompts of a step.

    Left out: rows of files with their labels, and the choice of prompts by their difficulty.
    """
    rng = np.random.default_rng((SEED, step))
    numbers = rng.choice(len(QUESTIONS), PROMPTS, replace=False)
    # The id and the visit key every random draw of a sample, with the seed. Its visit must change
    # where a prompt comes again, or it would get the same random numbers again.
    tokens = [encoded(QUESTIONS[n], tokenizer) for n in numbers]
    return [Prompt.of_tokens(x, int(n), visit=step) for x, n in zip(tokens, numbers, strict=True)]


def encoded(question: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens of a question in the model's chat template."""
    return tokenizer.encode_prompt([{"role": "user", "content": question}])


def as_arrays(
    rollouts: list[Rollout], rewards: list[float], routes: jax.Array | None, length: int
) -> StepArrays:
    """Returns the learner's arrays, a row for each sample, the samples of a prompt together.

    Left out: samples without a reward (known = False), whose tokens then have no weight.
    """
    rows = len(rollouts)
    tokens = np.zeros((rows, length), np.int32)
    mask = np.zeros((rows, length), bool)
    logp = np.zeros((rows, length), np.float32)
    for row, rollout in enumerate(rollouts):
        start, end = len(rollout.prompt.tokens), len(rollout.tokens)
        tokens[row, :end] = rollout.tokens
        mask[row, start:end] = True  # only sampled tokens are trained
        logp[row, :end] = rollout.logp  # of the policy that sampled them
    return StepArrays(
        tokens=tokens,
        lengths=np.array([len(x.tokens) for x in rollouts], np.int32),
        mask=mask,
        rollout_logp=logp,
        reward=np.array(rewards, np.float32),
        known=np.ones(rows, bool),
        repetition=np.zeros(rows, np.float32),  # for a penalty that is not used here
        group=np.repeat(np.arange(rows // SAMPLES, dtype=np.int32), SAMPLES),
        routes=routes,  # they stay on the device
    )


def sample(
    engine: Engine, learner: Learner, prompts: list[Prompt]
) -> tuple[list[Rollout], jax.Array | None]:
    """Samples every prompt SAMPLES times; returns the samples in order and their routes.

    Left out: verifiers that score samples while others still run; groups that grow, dynamic
    sampling and samples that continue in the next step (`compass_jax.experience.collect`); weights
    that are quantised or move to other chips (`compass_jax.weights.sync`).
    """
    collection = Collection(
        engine,
        engine.load_params(learner.params),  # the trained weights in the layout of decoding
        prompts,
        SAMPLES,
        Purpose.TRAIN,
        SEED,
        policy_version=learner.version,
    )
    # Iterating runs the engine. Samples come as they finish; `row` is the place of each.
    rollouts = sorted(collection, key=lambda rollout: rollout.row)
    return rollouts, collection.routes


def train(source: Path, out: Path, steps: int, learning_rate: float) -> list[float]:
    """Trains the model of a folder, writes it to another, and returns the mean reward per step.

    Left out: a mesh of devices, bfloat16 and rematerialisation (ComputeConfig, `sharding`);
    checkpoints and an exact resume; evaluation; logs and the report.
    """
    tokenizer = Tokenizer.load(source)
    shape = read_hf_config(source)
    compute = ComputeConfig()
    longest = max(len(encoded(question, tokenizer)) for question in QUESTIONS)
    config = settings(longest, learning_rate)
    known = tokenizer.vocab_size  # rows of the vocabulary without a token are never sampled

    model = Transformer(shape, compute, known=known)
    params = load_params(source, shape, compute.param_dtype)
    learner = Learner.start(config, model, params)
    engine = Engine(shape, compute, config.rollout, tokenizer.end_ids, known=known)

    means = []
    for step in range(steps):
        prompts = step_prompts(step, tokenizer)
        rollouts, routes = sample(engine, learner, prompts)
        rewards = [reward_of(tokenizer.decode(rollout.response)) for rollout in rollouts]
        arrays = as_arrays(rollouts, rewards, routes, config.updates.buckets[-1])
        # Old log-probs, advantages, gradients over micro-batches, one update of the optimiser.
        metrics = learner.train(arrays)
        means.append(float(np.mean(rewards)))
        answer = tokenizer.decode(rollouts[0].response)
        # How far the sampler's log-probs are from the learner's: rounding, with routes replayed.
        mismatch = metrics["mismatch/logp_abs_diff"]
        print(
            f"step {step + 1}: reward {means[-1]:.3f}, entropy {metrics['entropy_nats']:.2f} nats,"
            f" mismatch {mismatch:.0e}, an answer {answer!r:.40}",
            flush=True,
        )
    save_params(learner.params, shape, out, "float32", tokenizer_from=source, replace=True)
    return means


def main() -> None:
    """Trains the folder that the command line names, or a tiny model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face folder with a tokenizer")
    parser.add_argument("out", nargs="?", type=Path, default=Path("runs/one_page"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="1e-6 for a real model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        source = args.model or make_tiny_model(Path(temporary) / "tiny")
        means = train(source, args.out, args.steps, args.learning_rate)
    print(f"reward {means[0]:.3f} -> {means[-1]:.3f}; the trained model is in {args.out}")


if __name__ == "__main__":
    main()
