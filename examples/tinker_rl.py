"""RL with the client of the Tinker API against `compass serve MODEL --tinker`, with router replay.

TINKER_BASE_URL=http://127.0.0.1:9000 TINKER_API_KEY=tml-local python examples/tinker_rl.py NAME
"""

import sys

import tinker
from tinker import (
    AdamParams,
    Datum,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SamplingParams,
    ServiceClient,
)

PROMPT, STEPS, GROUP = list(b"1 + 1 = "), 20, 16


def datum(sample: tinker.SampledSequence, advantage: float) -> Datum:
    """Returns a sample with its advantage; the spans name its routes, which the server keeps."""
    n, m, key = len(PROMPT), len(sample.tokens), sample.sequence_id
    tokens = [*PROMPT, *sample.tokens]
    before = [0.0] * (n - 1)
    inputs = {"target_tokens": tokens[1:], "logprobs": [*before, *sample.logprobs]}
    inputs["advantages"] = [*before, *[advantage] * m]
    prompt, sampled = PromptProvenanceSpan, SampledProvenanceSpan
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs).with_provenance(
        [prompt(sequence_id=key, length=n), sampled(sequence_id=key, length=m - 1)],
        [prompt(sequence_id=key, offset=1, length=n - 1), sampled(sequence_id=key, length=m)],
    )


def main(name: str) -> None:
    """Trains all weights of the served model; the reward is the share of even token ids."""
    model = ServiceClient().create_lora_training_client(name, rank=0).result()
    for step in range(STEPS):
        sampler = model.save_weights_and_get_sampling_client().result()
        params = SamplingParams(max_tokens=16, seed=step)
        samples = sampler.sample(ModelInput.from_ints(PROMPT), GROUP, params).result().sequences
        rewards = [sum(t % 2 == 0 for t in x.tokens) / len(x.tokens) for x in samples]
        mean = sum(rewards) / GROUP
        data = [datum(x, r - mean) for x, r in zip(samples, rewards, strict=True)]
        passed = model.forward_backward(data, "importance_sampling")
        model.optim_step(AdamParams(learning_rate=1e-3))
        metrics = passed.result().metrics
        print(f"step {step} reward {mean:.3f} k3 {metrics['mismatch/kl_k3:mean']:.1e}", flush=True)
    print(model.save_state("last").result().path)


if __name__ == "__main__":
    main(sys.argv[1])
