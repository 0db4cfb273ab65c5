"""Folders whose tensors have several float types: an import and an export keep the type of each, or
say what changed.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hf_folders import MOE, TIED, assert_same_bits, random_params, tensors_of, write_folder
from tiny_run import tiny_run

from compass_jax.commands import cli
from compass_jax.config.io import config_to_json
from compass_jax.weights import checkpoint
from compass_jax.weights.convert import export_hf, import_hf
from compass_jax.weights.hf import save_params
from compass_jax.weights.hf_config import read_json
from compass_jax.weights.upcycle import upcycle

BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Tensors whose numbers every float type holds."""
    folder = save_params(random_params(MOE), MOE, tmp_path_factory.mktemp("x") / "f", "float32")
    return {name: x.astype(BF16).astype(np.float32) for name, x in tensors_of(folder).items()}


def source_with(folder, drawn, kind, **kinds):
    """Writes the tensors as `kind`; `kinds`: part of a name, with "_" for ".", -> another type."""

    def type_of(name):
        return next((x for part, x in kinds.items() if part in name.replace(".", "_")), kind)

    return write_folder(folder, MOE, {name: x.astype(type_of(name)) for name, x in drawn.items()})


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        (np.float16, {"mlp_gate_weight": np.float32}),
        (BF16, {"norm": np.float32}),
        (np.float32, {"embed": BF16, "lm_head": np.float16}),
        (BF16, {"k_norm": np.float16, "o_proj": np.float64}),
    ],
)
def test_each_tensor_keeps_its_type_through_a_checkpoint(tmp_path, drawn, kind, kinds):
    source, lines = source_with(tmp_path / "source", drawn, kind, **kinds), []
    import_hf(source, tmp_path / "run")
    exported = export_hf(tmp_path / "run", tmp_path / "out", tell=lines.append)
    original, tensors = tensors_of(source), tensors_of(exported)
    assert len({x.dtype for x in original.values()}) > 1 and tensors.keys() == original.keys()
    for name, x in original.items():
        assert_same_bits(tensors[name], x)
    assert lines == []
    dtype = str(original["model.embed_tokens.weight"].dtype)
    assert read_json(exported / "config.json")["torch_dtype"] == dtype


def test_layers_of_several_types_have_the_one_that_holds_all_and_it_is_said(
    tmp_path, drawn, capsys
):
    kinds = {"layers_1_self_attn_q_proj": np.float32, "layers_2_self_attn_q_proj": BF16}
    source = source_with(tmp_path / "source", drawn, np.float16, **kinds)
    assert cli.main(["import-hf", str(source), str(tmp_path / "run")]) == 0
    assert cli.main(["export-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    original, tensors = tensors_of(source), tensors_of(tmp_path / "out")
    changed = [name for name, x in original.items() if tensors[name].dtype != x.dtype]
    assert changed and all(name.endswith("q_proj.weight") for name in changed)
    for name in changed:
        np.testing.assert_array_equal(tensors[name], original[name].astype(np.float32))
    told = [x for x in capsys.readouterr().out.splitlines() if "another type" in x]
    assert len(told) == 1 and f"{len(changed)} of {len(tensors)} tensors" in told[0]
    assert f"than in {source} (" in told[0] and "from float16 to float32" in told[0]
    assert "one type for all layers of a parameter" in told[0]


@pytest.mark.parametrize("by", ["folder", "checkpoint"])
def test_an_export_of_a_run_says_which_tensors_have_the_run_s_type(tmp_path, drawn, by):
    source, run = source_with(tmp_path / "source", drawn, BF16), tmp_path / "run"
    if by == "checkpoint":
        import_hf(source, tmp_path / "imported")
    begun = source if by == "folder" else tmp_path / "imported"
    params = random_params(MOE)
    checkpoint.save(run, 3, {"state": {"params": params}}, {}, model=MOE)
    (run / "config.json").write_text(
        config_to_json(replace(tiny_run(), model=MOE, init_from=str(begun)))
    )
    lines = []
    exported = export_hf(run, tmp_path / "out", tell=lines.append)
    count = len(tensors_of(exported))
    assert lines == [
        f"{count} of {count} tensors have another type than in {source} ({count} from bfloat16 to"
        " float32): the run's parameters have the type of compute.param_dtype"
    ]
    lines.clear()
    export_hf(run, tmp_path / "narrow", "bfloat16", tell=lines.append)
    (run / "config.json").write_text(config_to_json(replace(tiny_run(), model=MOE)))
    export_hf(run, tmp_path / "drawn", tell=lines.append)
    assert lines == []


def test_upcycling_keeps_the_types_of_the_dense_model(tmp_path):
    dense = replace(TIED, o_bias=False, qkv_bias=False)
    folder = save_params(random_params(dense, "float16"), dense, tmp_path / "dense", "float16")
    tensors = tensors_of(folder)
    tensors |= {name: x.astype(np.float32) for name, x in tensors.items() if "norm" in name}
    source = write_folder(tmp_path / "source", dense, tensors)
    for name, x in tensors_of(upcycle(source, tmp_path / "moe", 2, 1)).items():
        assert x.dtype == (np.float32 if "norm" in name else np.float16), name
