"""Parents that cannot be merged and invalid options: the error names each, and writes no folder."""

import dataclasses
import json

import numpy as np
import pytest
from hf_folders import MOE, random_params, tensors_of, write_folder
from merging import END, ROUTER, family_of_three, merge, perturb, tensors_with

from compass_jax.apps.curate.merge import MergeError, method_of
from compass_jax.apps.curate.merge_folders import merge_folders
from compass_jax.model.families.raw import WeightsError
from compass_jax.weights.hf import save_params


@pytest.fixture
def folders(tmp_path):
    return family_of_three(tmp_path)


def config_with(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tokenizer_with(folder, change):
    raw = json.loads((folder / "tokenizer.json").read_text())
    change(raw)
    (folder / "tokenizer.json").write_text(json.dumps(raw))


DIFFERENCES = {
    "rope": (
        lambda x: config_with(x, rope_theta=5.0),
        r"one: config.json: rope_theta is 5.0, the base has 10000.0",
    ),
    "top_k": (
        lambda x: config_with(x, num_experts_per_tok=1),
        r"one: config.json: moe.top_k is 1, the base has 2",
    ),
    "family": (
        lambda x: config_with(x, model_type="falcon"),
        r"one/config.json: model_type = 'falcon'",
    ),
    "no config": (lambda x: (x / "config.json").unlink(), r"one/config.json does not exist"),
    "missing": (lambda x: tensors_with(x, lambda t: t.pop(ROUTER)), rf"one lacks tensor {ROUTER}"),
    "float64": (
        lambda x: tensors_with(x, lambda t: t.update({ROUTER: np.zeros((3, 16))})),
        rf"tensor {ROUTER} is stored as float64; supported: float32, bfloat16, float16",
    ),
    "token": (
        lambda x: tokenizer_with(x, lambda raw: raw["model"]["vocab"].update(b=2, ab=1)),
        r"one: tokenizer.json: 2 tokens differ: 'ab' is 1, the base has 2; 'b' is 2",
    ),
    "added token": (
        lambda x: tokenizer_with(
            x, lambda raw: raw["added_tokens"].append({**END, "content": "<x>", "id": 5})
        ),
        r"one: tokenizer.json: 1 tokens differ: '<x>'",
    ),
    "token of another file": (
        lambda x: (x / "tokenizer_config.json").write_text('{"cls_token": "<y>"}'),
        r"one: tokenizer.json: 1 tokens differ: '<y>'",
    ),
    "merges": (
        lambda x: tokenizer_with(x, lambda raw: raw["model"].update(merges=[["b", "a"]])),
        r"one: tokenizer.json: its merges differ",
    ),
    "no tokenizer": (
        lambda x: (x / "tokenizer.json").unlink(),
        r"base has a tokenizer.json and .*one has none",
    ),
    "damaged tokenizer": (
        lambda x: (x / "tokenizer.json").write_text('{"model": 3}'),
        r"one/tokenizer.json cannot be read: .*; download it again",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_parent_that_differs_is_refused_by_name(folders, tmp_path, name):
    change, message = DIFFERENCES[name]
    change(folders[1])
    with pytest.raises(MergeError, match=message):
        merge(folders, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "one", "two"]


def test_every_difference_of_every_parent_is_named_at_once(folders, tmp_path):
    base, one, two = folders
    config_with(one, rope_theta=5.0, num_experts_per_tok=1)
    tokenizer_with(one, lambda raw: raw["model"]["vocab"].update(c=5))
    tensors_with(two, lambda t: (t.pop(ROUTER), t.update(more=np.zeros(3, np.float32))))
    with pytest.raises(MergeError) as error:
        merge(folders, tmp_path / "out")
    first, *lines = str(error.value).split("\n")
    assert first == f"not all models are of the base {base}:"
    assert len(lines) == 5 and [f"{one}" in x for x in lines] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("kind", ["init_std", "positions", "tokens"])
def test_what_changes_no_maths_is_settled_by_the_base(folders, tmp_path, kind):
    changes = {
        "init_std": {"initializer_range": 0.5},
        "positions": {"max_position_embeddings": 9999},
        "tokens": {"eos_token_id": 3},
    }[kind]
    config_with(folders[1], **changes)
    result = merge(folders, tmp_path / "out")
    assert (result.path / "config.json").read_bytes() == (folders[0] / "config.json").read_bytes()
    notices = [x for x in result.notices if "eos_token_id 3; the merged model has the base's" in x]
    assert len(notices) == (kind == "tokens")


def test_a_parent_of_another_base_is_wondered_at(folders, tmp_path):
    far = {name: -x for name, x in tensors_of(folders[0]).items()}
    write_folder(folders[2], MOE, far)
    result = merge(folders, tmp_path / "out")
    (notice,) = [x for x in result.notices if "was it trained from this base?" in x]
    assert notice.startswith(f"{folders[2]} differs from the base by 2 times the base's norm")


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_named(folders, tmp_path, which, bad):
    def spoil(tensors):
        x = tensors["model.norm.weight"].copy()
        x[3] = bad
        tensors["model.norm.weight"] = x

    tensors_with(folders[which], spoil)
    for name in ("ties", "linear"):
        with pytest.raises(WeightsError, match=r"tensor model.norm.weight: of 16 .* 1 are NaN or"):
            merge(folders, tmp_path / "out", name)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_entries_too_large_for_the_bases_type_are_named(folders, tmp_path):
    base, one, two = folders
    tensors_with(base, lambda t: t.update({n: x.astype(np.float16) for n, x in t.items()}))
    with pytest.raises(MergeError, match=r"merged entries [0-9,]+ are too large for float16; give"):
        merge((base, one, two), tmp_path / "out", scale=1e6)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_left_alone(folders, tmp_path):
    (tmp_path / "out").mkdir()
    merge(folders, tmp_path / "out")  # an empty one is filled
    before = (tmp_path / "out" / "merge.json").read_bytes()
    with pytest.raises(WeightsError, match="out already exists: choose another name"):
        merge(folders, tmp_path / "out", "linear")
    assert (tmp_path / "out" / "merge.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": float("nan")}, "scale: nan must be 0, or of magnitude 1e-6 to 1e6"),
        ({"routers_from": 3}, "routers: 3 of 2 models"),
    ],
)
def test_options_that_cannot_be_are_named(folders, tmp_path, options, message):
    with pytest.raises(MergeError, match=message):
        merge(folders, tmp_path / "out", **options)


def test_dense_models_have_no_routers(tmp_path):
    dense = dataclasses.replace(MOE, family="qwen3", moe=None, layers=2)
    base = save_params(random_params(dense), dense, tmp_path / "base", "float32")
    other = write_folder(tmp_path / "other", dense, perturb(tensors_of(base), 1))
    with pytest.raises(MergeError, match="routers: the models have none, they are dense"):
        merge((base, other), tmp_path / "out", routers_from=0)


def test_models_must_be_there(folders, tmp_path):
    base, _, two = folders
    with pytest.raises(MergeError, match=r"nowhere: there is no such folder"):
        merge((base, tmp_path / "nowhere", two), tmp_path / "out")
    with pytest.raises(MergeError, match="there is no model to merge"):
        merge_folders(base, [], tmp_path / "out", method_of("linear", 1))
