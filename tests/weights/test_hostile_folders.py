"""Hugging Face folders that are damaged, inconsistent or hostile: each is refused with a message,
and no file outside the folder is read or written.
"""

import json
import random
import time

import jax
import ml_dtypes
import numpy as np
import pytest
from hf_folders import MOE, QWEN2, TIED, random_params, tensors_of, write_folder
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from compass_jax.commands import cli
from compass_jax.model.families.keys import HARMLESS, NEUTRAL
from compass_jax.model.families.qwen3_moe import FAMILY
from compass_jax.model.families.raw import WeightsError
from compass_jax.weights.convert import export_hf, import_hf
from compass_jax.weights.hf import load_params, save_params
from compass_jax.weights.hf_config import read_hf_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    """Returns the three models' float32 tensors on disk, by name."""
    folder = tmp_path_factory.mktemp("saved")
    models = {"moe": MOE, "tied": TIED, "qwen2": QWEN2}
    return {
        name: tensors_of(save_params(random_params(config), config, folder / name, "float32"))
        for name, config in models.items()
    }


def with_bad(tensors, name, *values):
    """Returns `tensors` with the first entries of one of them replaced."""
    changed = {key: x.copy() for key, x in tensors.items()}
    changed[name].reshape(-1)[: len(values)] = values
    return changed


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_a_weight_that_is_not_finite_is_refused_by_file_and_tensor(tmp_path, tensors, dtype, bad):
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    stored = {key: x.astype(dtype) for key, x in tensors["moe"].items()}
    good = write_folder(tmp_path / "good", MOE, stored, shards=2)
    load_params(good, MOE, "float32")
    folder = write_folder(tmp_path / "bad", MOE, with_bad(stored, name, BAD[bad], 1, BAD[bad]), 2)
    for param_dtype in ("float32", "bfloat16"):
        with pytest.raises(
            WeightsError, match=r"model-0000\d-of.*up_proj\.weight: of 160 .* 2 are NaN"
        ):
            load_params(folder, MOE, param_dtype)
    with pytest.raises(WeightsError, match="are NaN or infinite"):
        import_hf(folder, tmp_path / "run")
    assert cli.main(["import-hf", str(folder), str(tmp_path / "run")]) == 2


def test_the_largest_weights_are_finite_and_those_that_a_type_cannot_hold_are_refused(
    tmp_path, tensors
):
    name = "model.norm.weight"
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        most = np.asarray(ml_dtypes.finfo(dtype).max, dtype)
        stored = {key: x.astype(dtype) for key, x in tensors["moe"].items()}
        folder = write_folder(tmp_path / str(most.dtype), MOE, with_bad(stored, name, most, -most))
        load_params(folder, MOE, str(most.dtype))
    wide = {key: x.astype(np.float64) for key, x in tensors["moe"].items()}
    folder = write_folder(tmp_path / "wide", MOE, with_bad(wide, name, 1e300))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight: .* 1 are too large for float32"):
        load_params(folder, MOE, "float32")


def test_a_tied_head_and_each_devices_part_are_checked(tmp_path, tensors):
    name = "model.embed_tokens.weight"
    bad = with_bad(tensors["tied"], name, np.nan)
    folder = write_folder(tmp_path / "tied", TIED, bad | {"lm_head.weight": bad[name]})
    with pytest.raises(WeightsError, match=r"embed_tokens\.weight: of 640 .* 1 are NaN"):
        load_params(folder, TIED, "float32")
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def sharding(x):
        split = PartitionSpec(*("x" if size % 4 == 0 else None for size in x.shape[-1:]))
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(x.shape) - 1), *split))

    with pytest.raises(WeightsError, match=r"embed_tokens\.weight: of 160 .* 1 are NaN"):
        load_params(folder, TIED, "float32", jax.tree.map(sharding, random_params(TIED)))


def test_other_weights_beside_the_index_are_refused(tmp_path, tensors):
    folder = write_folder(tmp_path / "m", QWEN2, tensors["qwen2"], shards=2)
    first = folder / "model-00001-of-00002.safetensors"
    (folder / SINGLE).write_bytes(first.read_bytes())
    with pytest.raises(WeightsError, match=rf"holds {SINGLE} beside the weights, and {INDEX} does"):
        load_params(folder, QWEN2, "float32")
    (folder / SINGLE).rename(folder / "model-00003-of-00003.safetensors")
    with pytest.raises(WeightsError, match=r"holds model-00003-of-00003\.safetensors beside"):
        load_params(folder, QWEN2, "float32")
    unsharded = write_folder(tmp_path / "one", QWEN2, tensors["qwen2"])
    load_params(unsharded, QWEN2, "float32")
    (unsharded / first.name).write_bytes(first.read_bytes())
    with pytest.raises(WeightsError, match=f"{first.name} beside the weights, and there is no"):
        load_params(unsharded, QWEN2, "float32")


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", ["consolidated", "consolidated-00001-of-00002"])
def test_mistral_s_own_copy_of_the_weights_is_not_read(tmp_path, tensors, shards, name):
    folder = write_folder(tmp_path / "m", QWEN2, tensors["qwen2"], shards=shards)
    (folder / f"{name}.safetensors").write_bytes(b"not read")
    load_params(folder, QWEN2, "float32")


def test_an_index_may_name_a_single_file(tmp_path, tensors):
    folder = write_folder(tmp_path / "m", QWEN2, tensors["qwen2"])
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors["qwen2"], SINGLE)}))
    load_params(folder, QWEN2, "float32")


@pytest.mark.parametrize(
    "name",
    [
        "../a/model.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a" * 5000,
        "a\0.safetensors",
        "config.json",
        3,
        None,
        ["x"],
    ],
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path, tensors, name):
    folder = write_folder(tmp_path / "a", QWEN2, tensors["qwen2"], shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="weight_map must give a file of this folder"):
        load_params(folder, QWEN2, "float32")


def hub_cache(root, files):
    """Returns a folder laid out as the Hugging Face cache: snapshots/REVISION/x ->
    ../../blobs/y.
    """
    snapshot, blobs = root / "models--a--b" / "snapshots" / "0123", root / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(files):
        (blobs / f"{number:040x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def test_links_of_the_hugging_face_cache_are_followed(tmp_path, tensors):
    plain = write_folder(tmp_path / "plain", QWEN2, tensors["qwen2"], shards=2)
    (plain / "vocab.json").write_text('{"a": 1}')
    snapshot = hub_cache(tmp_path, list(plain.iterdir()))
    import_hf(snapshot, tmp_path / "run")
    out = export_hf(tmp_path / "run", tmp_path / "out")
    assert (out / "vocab.json").read_text() == '{"a": 1}' and not (out / "vocab.json").is_symlink()


def test_a_link_that_leads_nowhere_is_named(tmp_path, tensors):
    folder = write_folder(tmp_path / "m", QWEN2, tensors["qwen2"])
    (folder / "vocab.json").symlink_to("nothing-there")
    with pytest.raises(WeightsError, match=r"vocab\.json is a link that leads nowhere"):
        import_hf(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def rewrite_header(file, change):
    """Replaces the header of a safetensors file by the result of `change` on its text."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = change(data[8 : 8 + size].decode().rstrip())
    head = head if isinstance(head, bytes) else head.encode()
    head += b" " * (-len(head) % 8)
    file.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + size :])


def field(name, value):
    """Returns a function that changes one field of the first tensor in a header."""

    def change(text):
        head = json.loads(text)
        next(v for k, v in head.items() if k != "__metadata__")[name] = value
        return json.dumps(head)

    return change


HEADERS = {
    "offsets beyond the end": field("data_offsets", [0, 2**63]),
    "no such type": field("dtype", "F7"),
    "a type of eight bits": field("dtype", "F8_E4M3"),
    "no text": lambda text: b"\xff\xfe\xfd",
    "nothing": lambda text: "",
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_cannot_be_is_refused(tmp_path, tensors, case):
    folder = write_folder(tmp_path / "m", QWEN2, tensors["qwen2"])
    rewrite_header(folder / SINGLE, HEADERS[case])
    with pytest.raises(WeightsError, match=SINGLE):
        load_params(folder, QWEN2, "float32")


@pytest.mark.parametrize("size", [0, 2**63])
def test_a_header_of_absurd_length_is_refused(tmp_path, tensors, size):
    folder = write_folder(tmp_path / "m", QWEN2, tensors["qwen2"])
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(size.to_bytes(8, "little") + data[8:])
    with pytest.raises(WeightsError, match="truncated or damaged"):
        load_params(folder, QWEN2, "float32")


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": 10**9},
        {"num_hidden_layers": 2**31},
        {"num_hidden_layers": 10**18},
        {"num_experts": 60_000},
    ],
)
def test_a_configuration_of_absurd_size_is_refused_at_once(tmp_path, tensors, change):
    folder = write_folder(tmp_path / "m", MOE, tensors["moe"])
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | change))
    start = time.monotonic()
    assert cli.main(["import-hf", str(folder), str(tmp_path / "run")]) == 2
    assert time.monotonic() - start < 10


NUMBERS = [0, 1, -1, 1.5, 2**31, 2**63, 10**18, 10**30, 1e300, float("nan"), float("inf")]
ODD = [None, True, "", "x", "\ud800", "a\0", [], {}, [[]], [None], {"a": 1}, list(range(10**4))]
ODD += [*NUMBERS, {"rope_type": [], "rope_theta": 1}, "a" * 10**5, ["full_attention"] * 6]


def mutated(value, rng):
    """Returns `value` with one random change."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        remaining = {k: v for k, v in value.items() if k != key}
        way = rng.random()
        return (
            remaining
            if way < 0.1
            else remaining | {rng.choice(["x", "\ud800"]): 1}
            if way < 0.2
            else remaining | {key: mutated(value[key], rng)}
        )
    if isinstance(value, int) and rng.random() < 0.3:
        return value + rng.choice([-8, -1, 1, 8, 2**40])
    return rng.choice(ODD)


def damaged(text, rng):
    """Returns a JSON text with a few characters replaced, removed or inserted."""
    at, cut = rng.randrange(len(text)), rng.randrange(3)
    put = rng.choice(["", "{", "[", '"', ",", "1e999", "NaN", "\\ud800", "[" * 10**5])
    return text[:at] + put + text[at + cut :]


def test_two_hundred_random_faults_end_in_words(tmp_path, tensors):
    """Seeded changes of config.json, of the index and of headers are either harmless or raise a
    WeightsError.
    """
    keys = [*sorted(FAMILY.read_keys | HARMLESS | set(NEUTRAL)), "unknown", ""]
    refused = 0
    for number in range(200):
        rng = random.Random(number)
        kind = rng.choice(["config", "config", "index", "header"])
        folder = write_folder(tmp_path / str(number), QWEN2, tensors["qwen2"], shards=2)
        path = (
            folder
            / {
                "config": "config.json",
                "index": INDEX,
                "header": "model-00001-of-00002.safetensors",
            }[kind]
        )
        if kind == "header":
            rewrite_header(path, lambda text, rng=rng: json.dumps(mutated(json.loads(text), rng)))
        else:
            raw = json.loads(path.read_text())
            raw = (
                raw | {rng.choice(keys): rng.choice(ODD)} if kind == "config" else mutated(raw, rng)
            )
            text = json.dumps(raw)
            path.write_text(damaged(text, rng) if rng.random() < 0.2 else text)
        try:
            load_params(folder, read_hf_config(folder), "float32")
        except WeightsError as error:
            refused += 1
            assert len(str(error)) < 1500
    assert 100 < refused < 200
