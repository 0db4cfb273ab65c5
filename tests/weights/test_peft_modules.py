"""Adapters whose file has other modules than adapter_config.json names are refused with the names;
what it names is compared with PEFT's own rules.
"""

import json

import numpy as np
import pytest
from hf_folders import MOE, TIED, random_params, tensors_of
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.numpy import save_file

from compass_jax.commands import cli
from compass_jax.model.families.raw import WeightsError
from compass_jax.weights.hf import save_params
from compass_jax.weights.peft import merge_adapters
from compass_jax.weights.peft_modules import check_modules

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LAYERS = [f"model.layers.{i}" for i in range(TIED.layers)]
QV = [f"{layer}.self_attn.{x}" for layer in LAYERS for x in ("q_proj", "v_proj")]
BOTH = {"target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_params(random_params(TIED), TIED, tmp_path_factory.mktemp("b") / "f", "float32")


def modules_of(folder):
    matrices = [name for name, x in tensors_of(folder).items() if x.ndim == 2]
    return {name.removesuffix(".weight") for name in matrices}


def adapter(folder, base, held, **settings):
    """Writes an adapter with factors of the modules `held`."""
    folder.mkdir()
    raw = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    shapes = {name: x.shape for name, x in tensors_of(base).items()}
    factors = {}
    for module in held:
        rows, columns = shapes[f"{module}.weight"]
        factors[f"base_model.model.{module}.lora_A.weight"] = np.ones((1, columns), np.float32)
        factors[f"base_model.model.{module}.lora_B.weight"] = np.ones((rows, 1), np.float32)
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


REFUSED = {
    "empty": ([], BOTH, "no factors of model.layers.0.self_attn.q_proj, .* and 1 more"),
    "a module is missing": (
        QV[:-1],
        BOTH,
        r"no factors of model\.layers\.1\.self_attn\.v_proj, wh",
    ),
    "a layer is missing": (QV[:2], BOTH, r"no factors of model\.layers\.1\.self_attn\.q_proj, mod"),
    "not named": (
        QV,
        {"target_modules": ["q_proj"]},
        r"has factors of model\.layers\.0.*v_proj, mo",
    ),
    "another layer": (
        QV,
        {**BOTH, "layers_to_transform": [0]},
        r"has factors of model\.layers\.1\.self_attn\.q_proj, model\.layers\.1.*v_proj, which",
    ),
    "a layer as a number": (
        QV,
        {**BOTH, "layers_to_transform": 1},
        r"has factors of model\.layers\.0",
    ),
    "excluded": (QV, {**BOTH, "exclude_modules": ["v_proj"]}, "has factors of .*v_proj"),
    "a pattern": (
        QV,
        {"target_modules": r".*\.0\..*\.(q|v)_proj"},
        r"has factors of model\.layers\.1",
    ),
    "all": (
        QV,
        {"target_modules": "all-linear"},
        r"no factors of model\.layers\.0\.mlp\.down_proj, ",
    ),
    "a parameter": (
        QV,
        {**BOTH, "target_parameters": ["model.layers.0.mlp.up_proj.weight"]},
        r"no factors of model\.layers\.0\.mlp\.up_proj,",
    ),
    "the embedding": (
        QV,
        {"target_modules": ["q_proj", "v_proj", "embed_tokens"]},
        r"no factors of model\.embed_tokens,",
    ),
    "no targets": (QV, {"target_modules": None}, "target_modules names no modules"),
    "no list": (QV, {"target_modules": 7}, "target_modules = 7: a list of names"),
    "no pattern": (QV, {"target_modules": "(q_proj"}, r"target_modules = '\(q_proj' is no pattern"),
    "no layer": (QV, {**BOTH, "layers_to_transform": ["0"]}, r"layers_to_transform = \['0'\]: num"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_not_what_the_configuration_names_is_refused(tmp_path, base, name):
    held, settings, words = REFUSED[name]
    folder = adapter(tmp_path / "adapter", base, held, **settings)
    with pytest.raises(WeightsError, match=f"{folder}.*{words}"):
        merge_adapters(base, [folder], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_setting_that_peft_would_load_differently_is_refused_by_name(tmp_path, base, capsys):
    for i, settings in enumerate(
        ({"modules_to_save": ["embed_tokens"]}, {"rank_pattern": {"q": 2}})
    ):
        folder = adapter(tmp_path / f"{i}", base, QV, **BOTH, **settings)
        assert cli.main(["merge-lora", str(base), str(tmp_path / "x"), "--adapters", str(folder)])
        assert f"{next(iter(settings))} = " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("held", "settings"),
    [
        (QV, BOTH),
        (QV, {"target_modules": QV}),
        (QV, {"target_modules": r"model\.layers\.\d+\.self_attn\.(q|v)_proj"}),
        (QV[2:], {**BOTH, "layers_to_transform": [1]}),
        (QV[2:], {**BOTH, "layers_to_transform": 1, "layers_pattern": "layers"}),
        (QV[::2], {**BOTH, "exclude_modules": [".*v_proj", "v_proj"]}),
        (QV, {"target_modules": [*BOTH["target_modules"], "c_attn"]}),
        (QV[:1], {"target_modules": QV[:1], "layers_to_transform": [1]}),
    ],
)
def test_what_the_configuration_names_is_merged(tmp_path, base, held, settings):
    folder = adapter(tmp_path / "adapter", base, held, **settings)
    before = tensors_of(base)
    after = tensors_of(merge_adapters(base, [folder], tmp_path / "out"))
    changed = {name for name, x in before.items() if not np.array_equal(x, after[name])}
    assert changed == {f"{module}.weight" for module in held}


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": [*ATTENTION]},
        {"target_modules": ["self_attn.q_proj", "down_proj"]},
        {"target_modules": ["proj"]},
        {"target_modules": "model.layers.1.mlp.up_proj"},
        {"target_modules": r".*(up|down)_proj", "exclude_modules": r".*\.0\..*"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1, 7]},
        {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": ["h", "layers"]},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "blocks"},
        {"target_modules": [*ATTENTION], "exclude_modules": ["model.layers.0.self_attn.k_proj"]},
    ],
)
def test_the_named_modules_are_those_of_peft(base, settings):
    modules = modules_of(base)
    theirs = {x for x in modules if check_target_module_exists(LoraConfig(**settings), x)}
    if not theirs:
        with pytest.raises(WeightsError, match="it has no factors"):
            check_modules(settings, [], modules, "here")
        return
    check_modules(settings, theirs, modules, "here")
    for module in modules:
        with pytest.raises(WeightsError, match=f"factors of {module}, which"):
            check_modules(settings, theirs ^ {module}, modules, "here")


def test_experts_are_modules_or_parameters(tmp_path):
    """transformers 5 has the experts and the router as parameters, earlier versions as modules."""
    modules = modules_of(save_params(random_params(MOE), MOE, tmp_path / "moe", "float32"))
    linear = {x for x in modules if not x.endswith(("embed_tokens", "lm_head"))}
    dense = {x for x in linear if ".experts." not in x and not x.endswith("mlp.gate")}
    for held in (linear, dense):
        check_modules({"target_modules": "all-linear"}, held, modules, "here")
    for held in (linear - {"model.layers.1.mlp.experts.2.up_proj"}, dense - {min(dense)}):
        with pytest.raises(WeightsError, match="no factors of model"):
            check_modules({"target_modules": "all-linear"}, held, modules, "here")
