"""An engine from outside the package, over transformers, that rolls out a run."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from evolve import evolve
from tiny_run import tiny_run
from transformers import AutoModelForCausalLM

from compass_jax.base.records import UNKNOWN_LOGP
from compass_jax.config import ConfigError, EngineJudgeConfig
from compass_jax.rollout.drafts import Lenient
from compass_jax.rollout.engine_api import ResultTokens
from compass_jax.rollout.plain_engine import PlainEngine
from compass_jax.training.own_engine import check_own_engine, check_samplers
from compass_jax.training.rl import rl_steps
from compass_jax.training.scored import Scored
from compass_jax.weights.hf import save_params


class TransformersEngine:
    """JetStream's contract over a model of transformers, without a cache of keys and values. Its
    state is the tokens and the random generator of each slot.
    """

    samples_per_slot, colocated_cpus = 1, None
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))

    def __init__(self, config, known, folder, keeps_logp):
        self.config, self.known = config, known
        self.folder, self.keeps_logp = folder, keeps_logp
        self.max_concurrent_decodes = config.rollout.slots
        self.max_prefill_length = config.rollout.prompt_buckets[-1]
        self.loads = 0

    def load_params(self, params):
        self.loads += 1
        save_params(params, self.config.model, self.folder / str(self.loads), None)
        return AutoModelForCausalLM.from_pretrained(self.folder / str(self.loads)).eval()

    def init_decode_state(self):
        return [([], np.random.default_rng(0)) for _ in range(self.max_concurrent_decodes)]

    def prefill(
        self, *, params, existing_prefix=None, padded_tokens, true_length, rng, sampler=None
    ):
        return padded_tokens[:true_length].tolist(), np.random.default_rng(np.asarray(rng))

    def insert(self, prefix, decode_state, slot):
        return [prefix if i == slot else x for i, x in enumerate(decode_state)]

    @torch.no_grad()
    def generate(self, params, decode_state, sampler=None):
        n = self.max_concurrent_decodes
        data, logps = np.zeros((n, 3), np.int32), np.zeros((n, 1), np.float32)
        longest = max(len(tokens) for tokens, _ in decode_state)
        ids, mask = np.zeros((2, n, longest), np.int64)
        for i, (tokens, _) in enumerate(decode_state):
            ids[i, : len(tokens)], mask[i, : len(tokens)] = tokens, 1
            mask[i, 0] = 1  # an empty slot
        out = params(torch.tensor(ids), attention_mask=torch.tensor(mask))
        for i, (tokens, rng) in enumerate(decode_state):
            logits = out.logits[i, max(len(tokens) - 1, 0), : self.known].double()
            logp = torch.log_softmax(logits / (sampler.temperature or 1), -1).numpy()
            greedy = sampler.temperature == 0
            probs = np.exp(logp) / np.exp(logp).sum()
            token = int(logp.argmax() if greedy else rng.choice(len(logp), p=probs))
            data[i], logps[i, 0] = (token, bool(tokens), len(tokens)), logp[token]
            if tokens:
                tokens.append(token)
        logp = logps if self.keeps_logp else None
        return decode_state, ResultTokens(data, (0, 1), (1, 2), (2, 3), 1, logp)

    def get_tokenizer(self):
        raise NotImplementedError

    def build_tokenizer(self, metadata):
        raise NotImplementedError

    def get_prefix_destination_sharding(self):
        return None


def steps_of(config, directory, keeps_logp, known=None):
    config = evolve(config, run_dir=str(directory / "run"))
    engines = []

    def open_engine(config, tokenizer):
        ids = known or tokenizer.vocab_size
        engines.append(TransformersEngine(config, ids, directory, keeps_logp))
        return engines[0]

    steps = [step.metrics for step in rl_steps(config, open_engine=open_engine)]
    return steps, engines[0]


@pytest.mark.parametrize("keeps_logp", [True, False])
def test_an_engine_over_transformers_rolls_out_two_training_steps(tmp_path, keeps_logp):
    """It samples from the weights of each step: its log-probs are those of training."""
    config = evolve(tiny_run("odd_verifiers:coin"), rl={"replay": "R2"})
    steps, engine = steps_of(config, tmp_path, keeps_logp)
    assert len(steps) == 2 and engine.loads == 3
    for step in steps:
        assert step["grad_norm"] > 0
        if keeps_logp:
            assert "mismatch/unknown_frac" not in step
            assert 0 < step["mismatch/logp_abs_diff"] < 1e-4
        else:
            assert step["mismatch/unknown_frac"] == 1 and step["mismatch/logp_abs_diff"] == 0


def test_an_id_that_the_tokenizer_does_not_have_ends_the_run(tmp_path):
    """The model has 384 columns, the tokenizer fewer ids; training gives the others no chance."""
    config = evolve(tiny_run("odd_verifiers:coin"), rl={"replay": "off"})
    with pytest.raises(ConfigError, match=r"TransformersEngine drew the id \d+, and the tokenizer"):
        steps_of(config, tmp_path, True, known=384)


def test_settings_that_need_the_packages_engine_are_refused(tmp_path):
    base, judge = {"rl": {"replay": "off"}}, EngineJudgeConfig(prompt_buckets=(32,), max_tokens=8)
    for changes, message in (
        ({"rl": {"replay": "R3"}}, "rl.replay = 'R3': an engine with JetStream's methods alone"),
        ({"rl": {"replay": "off", "drafts": Lenient()}}, "rl.drafts needs the engine of this pack"),
        (base | {"rollout_apart": True}, "rollout_apart and samplers: each needs the engine"),
        (base | {"rollout": {"quantize": "int8"}}, "rollout.quantize needs the engine of this pa"),
        (base | {"rewards": {"judge": judge}}, "rewards.judge as the policy needs the engine"),
    ):
        config = evolve(tiny_run(), **changes)
        elsewhere = config.rollout_apart or config.samplers.acts
        with pytest.raises(ConfigError, match=message):
            check_own_engine(config.rl, config.model, config.rollout, config.rewards, elsewhere)
    with pytest.raises(ConfigError, match=r"rl\.replay = 'R3'"):
        steps_of(tiny_run(), tmp_path, True)


def test_a_log_prob_that_is_unknown_is_trainings_and_one_that_is_nan_stays():
    """NaN is a fault of a sampler, which the mismatch shows."""
    arrays = SimpleNamespace(rollout_logp=np.array([[-1.0, UNKNOWN_LOGP, np.nan]], np.float32))
    old_logp = np.array([[-2.0, -3.0, -4.0]], np.float32)
    scored = Scored(arrays, None, old_logp, old_logp, None, None)
    np.testing.assert_array_equal(scored.sampler_logp(), [[-1.0, -3.0, np.nan]])


class WithoutSampler(TransformersEngine):
    def generate(self, params, decode_state):
        raise AssertionError("refused before the first token")


def test_a_run_that_samples_at_other_temperatures_needs_a_sampler():
    config = tiny_run()

    def engine(kind):
        return PlainEngine(kind(config, 300, None, True), config.rollout, (1,))

    check_samplers(engine(TransformersEngine), evaluated=True)
    check_samplers(engine(WithoutSampler), evaluated=False)
    with pytest.raises(ConfigError, match="takes no sampler, and the run"):
        check_samplers(engine(WithoutSampler), evaluated=True)
