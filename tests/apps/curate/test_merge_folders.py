"""Folders merged into a new one: every entry against the formula on full tensors, and the files."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from hf_folders import MOE, TIED, random_params, tensors_of, write_folder
from merging import BF16, ROUTER, family_of_three, merge, perturb
from safetensors.numpy import save_file
from test_merge import ties_reference

from compass_jax.apps.curate import merge_folders as room
from compass_jax.apps.curate.merge import Combined
from compass_jax.apps.curate.merge_folders import merge_folders
from compass_jax.weights.convert import import_hf
from compass_jax.weights.digests import of_files
from compass_jax.weights.hf import load_params, parameters_of, save_params


@pytest.fixture
def folders(tmp_path):
    return family_of_three(tmp_path)


def flat(tensors, names):
    return np.concatenate([tensors[name].astype(np.float32).reshape(-1) for name in names])


def test_ties_of_folders_is_ties_of_their_flattened_deltas(folders, tmp_path, monkeypatch):
    """Reads and blocks have a few entries, so that no tensor is read in one piece."""
    monkeypatch.setattr(room, "READ", 17)
    result = merge(folders, tmp_path / "out", weights=(1.0, 2.0), density=(0.2, 0.5), scale=0.5)
    tensors = [tensors_of(folder) for folder in folders]
    names = sorted(tensors[0])
    base, *models = (flat(one, names) for one in tensors)
    deltas = np.array([model - base for model in models])
    trimmed, merged = ties_reference(deltas, (1.0, 2.0), (0.2, 0.5))
    expected = (base + np.float32(0.5) * merged).astype(BF16)
    out = tensors_of(result.path)
    assert sorted(out) == names and {x.dtype for x in out.values()} == {np.dtype(BF16)}
    np.testing.assert_array_equal(flat(out, names), expected.astype(np.float32))
    for share, delta, trimmed_delta in zip(result.parents, deltas, trimmed, strict=True):
        agree = np.sign(trimmed_delta) == np.sign(merged)
        assert share.kept_share == np.count_nonzero(trimmed_delta) / trimmed_delta.size
        assert share.agreeing == np.count_nonzero(agree & (trimmed_delta != 0)) / np.count_nonzero(
            trimmed_delta
        )
        norms = np.linalg.norm(delta.astype(np.float64)), np.linalg.norm(base.astype(np.float64))
        assert share.norm == pytest.approx(norms[0]) and share.norm > 1
        assert share.relative_norm == pytest.approx(norms[0] / norms[1])


@pytest.mark.parametrize("name", ["ties", "linear"])
def test_blocks_shards_and_their_order_change_no_bit(folders, tmp_path, monkeypatch, name):
    reference = tensors_of(merge(folders, tmp_path / "whole", name).path)
    monkeypatch.setattr(room, "READ", 53)
    base, one, two = folders
    resharded = write_folder(tmp_path / "again", MOE, tensors_of(one), 7)
    shutil.copyfile(one / "tokenizer.json", resharded / "tokenizer.json")
    parts = merge((base, resharded, two), tmp_path / "parts", name, shard_bytes=3000).path
    assert len(list(parts.glob("*.safetensors"))) > 5
    parts = tensors_of(parts)
    for tensor, x in reference.items():
        np.testing.assert_array_equal(x, parts[tensor])


@pytest.mark.parametrize("name", ["ties", "linear"])
def test_scale_zero_gives_the_base(folders, tmp_path, name):
    out = tensors_of(merge(folders, tmp_path / "out", name, scale=0.0).path)
    base = tensors_of(folders[0])
    assert {name: x.tobytes() for name, x in out.items()} == {
        name: x.tobytes() for name, x in base.items()
    }


def test_files_are_the_bases_and_the_record_says_what_was_done(folders, tmp_path):
    base, one, two = folders
    result = merge(folders, tmp_path / "out", routers_from=2)
    index = "model.safetensors.index.json"
    merged_index, base_index = (
        json.loads((x / index).read_text())["weight_map"] for x in (result.path, base)
    )
    assert merged_index == base_index and len(set(merged_index.values())) == 4
    for name in ("config.json", "tokenizer.json"):
        assert (result.path / name).read_bytes() == (base / name).read_bytes()
    record = json.loads((result.path / "merge.json").read_text())
    assert record["method"] == "ties" and record["density"] == [0.2, 0.2]
    assert record["weights"] == [1.0, 1.0] and record["scale"] == 1.0 and record["routers"] == 2
    entries = [record, record["base"], *record["models"]]
    assert [x["folder"] for x in entries[1:]] == [str(base), str(one), str(two)]
    for folder, entry in zip((result.path, base, one, two), entries, strict=True):
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        digests = of_files(folder, names)
        assert entry["files"] == {name: digests[name].value for name in names}
    assert [x["norm"] for x in record["models"]] == [share.norm for share in result.parents]
    assert record["notices"] == result.notices
    assert result.notices == [
        f"{two} holds float32; the merged model has the base's types, bfloat16"
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "one", "out", "two"]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_routers_of_one_model_are_its_own_and_count_for_nothing(folders, tmp_path, which):
    out = tensors_of(merge(folders, tmp_path / "out", routers_from=which).path)
    router = tensors_of(folders[which])[ROUTER].astype(BF16)
    assert out[ROUTER].tobytes() == router.tobytes()
    tensors = [tensors_of(folder) for folder in folders]
    names = [name for name in sorted(tensors[0]) if name != ROUTER]
    base, *models = (flat(one, names) for one in tensors)
    merged = ties_reference(np.array([m - base for m in models]), (1.0, 1.0), (0.2, 0.2))[1]
    np.testing.assert_array_equal(flat(out, names), (base + merged).astype(BF16).astype(np.float32))


def test_tensors_keep_the_bases_own_types_and_models_load(folders, tmp_path):
    """If a float16 base has its routers in float32, the merged model has them in float32 too."""
    base, one, two = folders
    mixed = {name: x.astype(np.float16) for name, x in tensors_of(base).items()}
    mixed[ROUTER] = mixed[ROUTER].astype(np.float32)
    write_folder(tmp_path / "mixed", MOE, mixed, 2)
    shutil.copyfile(base / "tokenizer.json", tmp_path / "mixed" / "tokenizer.json")
    result = merge((tmp_path / "mixed", one, two), tmp_path / "out", "linear")
    out = tensors_of(result.path)
    assert {name for name, x in out.items() if x.dtype == np.float32} == {ROUTER}
    params = load_params(result.path, MOE, "float32")
    np.testing.assert_array_equal(
        params["embed"], out["model.embed_tokens.weight"].astype(np.float32)
    )


def test_one_shard_with_an_index_stays_one(folders, tmp_path):
    """Some tools write a small model as one shard that is not called model.safetensors."""
    base, one, _ = folders
    tensors = tensors_of(base)
    for file in base.glob("*.safetensors*"):
        file.unlink()
    name = "model-00001-of-00001.safetensors"
    save_file(tensors, base / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    path = merge((base, one), tmp_path / "out", "linear").path
    assert [file.name for file in path.glob("*.safetensors")] == [name]
    assert load_params(path, MOE, "float32")["embed"].shape == (40, 16)


def test_a_method_of_ones_own_is_a_class_with_prepare(folders, tmp_path):
    """The class in this test returns the second parent unchanged."""

    @dataclasses.dataclass(frozen=True)
    class Second:
        def prepare(self, blocks):
            return lambda block: Combined(block.deltas, block.deltas[1])

    result = merge_folders(folders[0], folders[1:], tmp_path / "out", Second())
    assert json.loads((result.path / "merge.json").read_text())["method"] == "Second"
    two = tensors_of(folders[2])
    for name, x in tensors_of(result.path).items():
        np.testing.assert_allclose(x.astype(np.float32), two[name], rtol=2**-7, atol=2**-7)


def test_a_tied_head_that_repeats_the_embedding_is_left_out(tmp_path):
    params = random_params(TIED)
    tensors = tensors_of(save_params(params, TIED, tmp_path / "a", "float32"))
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    base = write_folder(tmp_path / "base", TIED, tensors | head)
    other = write_folder(tmp_path / "other", TIED, perturb(tensors, 1))
    out = merge((base, other), tmp_path / "out", "linear").path
    assert sorted(tensors_of(out)) == sorted(parameters_of(TIED))


def test_runs_and_checkpoints_are_parents_too(folders, tmp_path):
    base, one, two = folders
    import_hf(one, tmp_path / "run")
    import_hf(base, tmp_path / "base_run")
    step = next((tmp_path / "run" / "checkpoints").iterdir())
    expected = tensors_of(merge(folders, tmp_path / "wanted").path)
    for number, parent in enumerate((tmp_path / "run", step)):
        out = merge((tmp_path / "base_run", parent, two), tmp_path / f"out_{number}").path
        actual = tensors_of(out)
        assert {name: x.tobytes() for name, x in actual.items()} == {
            name: x.tobytes() for name, x in expected.items()
        }
        record = json.loads((out / "merge.json").read_text())
        assert record["models"][0]["folder"] == str(parent)
        assert not list(tmp_path.glob(".*"))
