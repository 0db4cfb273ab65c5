"""Rows of embedding and head beyond the tokenizer: dropped from the export of a randomly
initialised model, kept for an imported one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import MOE as NARROW
from hf_folders import TIED, random_params
from safetensors.numpy import load_file

from compass_jax.config import DataConfig, RunConfig
from compass_jax.model.families.raw import WeightsError
from compass_jax.model.logprobs import head_weights, logits_of
from compass_jax.model.transformer import Transformer, apply
from compass_jax.weights import checkpoint
from compass_jax.weights.convert import export_hf, import_hf
from compass_jax.weights.hf import save_params
from compass_jax.weights.hf_config import read_hf_config
from compass_jax.weights.start import VOCAB_ROWS, init_or_load, vocab_rows


def init_or_load_of(config, *args, **options):
    """Calls `init_or_load` with what it reads of a run's settings."""
    return init_or_load(config.init_from, config.model, config.compute, *args, **options)


KNOWN = 31  # ids of a tokenizer; a prime number, which no mesh divides
# torch multiplies groups of rows of a multiple of 16 bytes
MOE = dataclasses.replace(NARROW, moe=dataclasses.replace(NARROW.moe, ffn=8))
MODELS = {"head": MOE, "tied": TIED}


def drawn(folder, model, meta=None):
    """Saves a checkpoint of random parameters, as a run with random initialisation does."""
    params = random_params(model)
    meta = {VOCAB_ROWS: KNOWN} if meta is None else meta
    checkpoint.save(folder, 1, {"params": params}, meta, model=model)
    return params


def config_of(model, source=""):
    return RunConfig(name="r", model=model, init_from=str(source), data=DataConfig(tokenizer="t"))


@pytest.mark.parametrize("kind", MODELS)
def test_an_export_of_a_drawn_model_gives_transformers_the_same_logits(tmp_path, kind):
    """The logits agree for every id of the tokenizer, and the export has no other id that could be
    sampled.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = MODELS[kind]
    assert model.vocab_size > KNOWN
    params = drawn(tmp_path / "run", model)
    out = export_hf(tmp_path / "run", tmp_path / "out")
    assert read_hf_config(out) == dataclasses.replace(model, vocab_size=KNOWN)
    tensors = load_file(out / "model.safetensors")
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], params["embed"][:KNOWN])
    assert ("lm_head.weight" in tensors) == (kind == "head")
    if kind == "head":
        np.testing.assert_array_equal(tensors["lm_head.weight"], params["head"].T[:KNOWN])
    reference = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(0, KNOWN, (2, 9)).astype(np.int32)
    with torch.no_grad():
        logits = reference(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    positions, mask = jnp.broadcast_to(jnp.arange(9), tokens.shape), jnp.ones(tokens.shape, bool)
    hidden = apply(Transformer(model), params, jnp.asarray(tokens), positions, mask=mask).hidden
    actual = np.asarray(logits_of(hidden, head_weights(params)))
    assert logits.shape == (2, 9, KNOWN) and actual.shape[-1] == model.vocab_size
    np.testing.assert_allclose(logits, actual[..., :KNOWN], atol=5e-5, rtol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_an_imported_model_keeps_its_rows_bit_for_bit(tmp_path, kind):
    model = MODELS[kind]
    source = save_params(random_params(model), model, tmp_path / "source", "float32")
    import_hf(source, tmp_path / "run")
    out = export_hf(tmp_path / "run", tmp_path / "out")
    before, after = (load_file(x / "model.safetensors") for x in (source, out))
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].tobytes() == after[name].tobytes()


def test_how_many_rows_a_run_has_follows_from_where_it_starts(tmp_path):
    folder = save_params(random_params(MOE), MOE, tmp_path / "hf", "float32")
    import_hf(folder, tmp_path / "imported")
    drawn(tmp_path / "drawn", MOE)
    drawn(tmp_path / "older", MOE, meta={"kind": "sft"})  # an older version's
    sources = {
        "": KNOWN,
        folder: MOE.vocab_size,
        tmp_path / "imported": MOE.vocab_size,
        tmp_path / "drawn": KNOWN,
        checkpoint.locate(tmp_path / "drawn"): KNOWN,
        tmp_path / "older": MOE.vocab_size,
        export_hf(tmp_path / "drawn", tmp_path / "out"): KNOWN,
    }
    for source, rows in sources.items():
        assert vocab_rows(str(source), MOE.family, KNOWN) == rows, source
    assert vocab_rows(str(tmp_path / "drawn"), MOE.family, KNOWN + 2) == KNOWN + 2


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("split", [False, True])
def test_a_run_starts_from_the_export_with_zero_rows_for_the_mesh(tmp_path, kind, split):
    """The next stage of a pipeline starts this way, with a model of the configured size. Over eight
    devices, some have none of the folder's rows.
    """
    model = MODELS[kind]
    params = drawn(tmp_path / "run", model)
    out = export_hf(tmp_path / "run", tmp_path / "out")
    shardings = None
    if split:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))

        def sharding(path, x):
            axis = {"embed": 0, "head": 1}.get(path[0].key)
            spec = [("x" if i == axis else None) for i in range(x.ndim)]
            return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

        shardings = jax.tree_util.tree_map_with_path(sharding, params)
    loaded = init_or_load_of(config_of(model, out), jax.random.key(0), shardings, KNOWN)
    expected = {**params, "embed": params["embed"].at[KNOWN:].set(0)}
    if kind == "head":
        expected["head"] = params["head"].at[:, KNOWN:].set(0)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_a_start_without_rows_for_the_tokenizer_is_refused(tmp_path):
    drawn(tmp_path / "run", MOE)
    out = export_hf(tmp_path / "run", tmp_path / "out")
    with pytest.raises(WeightsError, match=r"has rows for 31 ids, .* has ids up to 31: name"):
        init_or_load_of(config_of(MOE, out), jax.random.key(0), None, KNOWN + 1)
    less = dataclasses.replace(MOE, vocab_size=KNOWN - 1)
    with pytest.raises(WeightsError, match=r"model.vocab_size: 31 there, 30 in the run's config"):
        init_or_load_of(config_of(less, out), jax.random.key(0))
    with pytest.raises(WeightsError, match="vocab_size"):  # a checkpoint has all rows
        more = dataclasses.replace(MOE, vocab_size=MOE.vocab_size + 8)
        init_or_load_of(config_of(more, tmp_path / "run"), jax.random.key(0))
