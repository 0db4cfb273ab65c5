# %% [markdown]
# # The learner as a library
#
# The learner turns arrays into updates of a model. It knows no prompts, files or engine: whatever
# made the samples, a learner trains on them. Nothing here is sampled from the model: answers are
# random tokens, and the reward counts how often the token 7 is among them.

# %%
import jax
import numpy as np

from compass_jax.base.records import StepArrays
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
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.training.learner import Learner

PROMPTS, SAMPLES, PROMPT, ANSWER, VOCABULARY, LUCKY = 4, 8, 4, 8, 32, 7

# %% [markdown]
# ## A model, and how it is trained
#
# A mixture of four small experts; GRPO with two updates of each rollout.

# %%
shape = ModelConfig(
    family="qwen3_moe",
    vocab_size=VOCABULARY,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=32,
    moe=MoEConfig(experts=4, top_k=2, ffn=16),
)
config = LearnerConfig(
    algorithm=AlgorithmConfig(objective=Grpo(), replay="off"),  # no routes were recorded
    updates=UpdatesConfig(
        updates_per_rollout=2,
        buckets=(PROMPT + ANSWER,),
        optim=OptimConfig(learning_rate=1e-2),
    ),
    sampling=SamplingConfig(prompts_per_step=PROMPTS, group_size=SAMPLES),
    rollout=RolloutConfig(prompt_buckets=(PROMPT,), max_new_tokens=ANSWER),
)
model = Transformer(shape, ComputeConfig())
params = init_params(shape, model.compute, jax.random.key(0))
learner = Learner.start(config, model, params)

# %% [markdown]
# ## Samples of any origin
#
# One row for each sample, the samples of a prompt one after the other. `rollout_logp` is what the
# sampling policy gives each token: here all tokens are equally likely.


# %%
def samples(seed: int) -> StepArrays:
    """Returns a rollout of random tokens, and its rewards."""
    rng = np.random.default_rng(seed)
    rows, length = PROMPTS * SAMPLES, PROMPT + ANSWER
    group = np.repeat(np.arange(PROMPTS, dtype=np.int32), SAMPLES)
    tokens = rng.integers(2, VOCABULARY, (rows, length), dtype=np.int32)
    tokens[:, :PROMPT] = group[:, None] + 2  # a prompt is one token, four times
    lucky = (tokens == LUCKY) & (np.arange(length) >= PROMPT)
    return StepArrays(
        tokens=tokens,
        lengths=np.full(rows, length, np.int32),
        mask=np.broadcast_to(np.arange(length) >= PROMPT, tokens.shape).copy(),
        rollout_logp=np.full(tokens.shape, -np.log(VOCABULARY - 2), np.float32),
        reward=lucky.sum(1).astype(np.float32),
        known=np.ones(rows, bool),
        repetition=np.zeros(rows, np.float32),
        group=group,
    )


# %% [markdown]
# ## Training
#
# `score` computes the log-probs before the first update, `update` makes one step of the optimiser.

# %%
likelihood = []
for step in range(12):
    scored = learner.score(samples(step))
    for rows in learner.updates:
        metrics = learner.update(scored, rows)
    lucky = (scored.arrays.tokens == LUCKY) & scored.arrays.mask
    likelihood.append(float(np.exp(scored.old_logp[lucky]).mean()))
    print(f"step {step + 1}: probability of token {LUCKY} {likelihood[-1]:.3f}")

# %% [markdown]
# `learner.state.params` holds the trained weights; `compass_jax.weights.hf.save_params` writes them
# as a Hugging Face folder.
