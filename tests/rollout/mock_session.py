"""JetStream's mock engine through the batcher, in a separate process because importing JetStream
also imports TensorFlow:

    python mock_session.py       prints the responses of two samples of a prompt and one of another
"""

import json

import numpy as np
from jetstream.engine.mock_engine import TestEngine

from compass_jax.base.records import Prompt
from compass_jax.config import RolloutConfig
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.plain_engine import PlainEngine
from compass_jax.rollout.sampling import Purpose


def main() -> None:
    mock = TestEngine(batch_size=2, cache_length=8, weight=2.0)
    rollout = RolloutConfig(slots=2, prompt_buckets=(8,), max_new_tokens=4, cache_bucket=4)
    engine = PlainEngine(mock, rollout, end_ids=(1,))
    prompts = [
        Prompt(n, 0, "", "", np.asarray(tokens, np.int32), "")
        for n, tokens in enumerate([[3, 5], [4, 4, 6]])
    ]
    samples = frozenset([prompts[0].sample(0), prompts[0].sample(1), prompts[1].sample(0)])
    collection = Collection(
        engine, mock.load_params(), prompts, 2, Purpose.TRAIN, 0, sample_keys=samples
    )
    rollouts = sorted(collection, key=lambda x: (x.prompt.id, x.sample))
    print(json.dumps([x.response.tolist() for x in rollouts]))


if __name__ == "__main__":
    main()
