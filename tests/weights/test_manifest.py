"""A manifest that cannot be what `save` wrote is refused, by file and key, by whatever reads a
checkpoint.
"""

import json
import shutil

import jax.numpy as jnp
import pytest
from forged import edit_manifest

from compass_jax.config import ModelConfig
from compass_jax.weights import checkpoint
from compass_jax.weights.checkpoint import CheckpointError

MODEL = ModelConfig("qwen3", 100, 32, 2, 2, 1, 16, 64)
ARRAYS = {"w": jnp.arange(12.0)}
LEAF = "w"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("run"), 1, ARRAYS, {"at": 1}, model=MODEL)


@pytest.fixture
def where(written, tmp_path):
    """A checkpoint of its own for each test."""
    return shutil.copytree(written, tmp_path / "checkpoints" / written.name)


def restore(path):
    return checkpoint.restore(path, checkpoint.abstract_like(ARRAYS))


NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "change,message",
    [
        *(
            (
                lambda x, name=name: x.pop(name) and None,
                f"manifest.json: the key '{name}' is missing",
            )
            for name in ("step", "model", "leaves", "files")
        ),
        (
            lambda x: x | {"format": 3},
            r"manifest.json: written in format 3; this version reads formats 1 and 2",
        ),
        (lambda x: x | {"format": [2]}, r"written in format \[2\]"),
        (lambda x: x | {"more": 1}, r"the key 'more' belongs to no manifest of format 2"),
        (lambda x: x | {"step": -1}, r"step = -1, a number of steps is expected"),
        (lambda x: x | {"step": True}, r"step = True, a number"),
        (lambda x: x | {"step": float("nan")}, r"manifest.json: step: NaN is no number of JSON"),
        (
            lambda x: x | {"step": 10**30},
            r"manifest.json: step: the integer 1000.* has more than 19 digits",
        ),
        (lambda x: x | {"model": []}, r"manifest.json: model"),
        (
            lambda x: x["model"].update(hidden="a"),
            r"manifest.json: model: hidden = 'a': the wrong type",
        ),
        (
            lambda x: x["model"].update(hidden=-1),
            r"manifest.json: model: hidden = -1: must be positive",
        ),
        (
            lambda x: x["model"].pop("hidden") and None,
            r"manifest.json: model: .*hidden must be given",
        ),
        (lambda x: x | {"leaves": [1]}, r"leaves = \[1\], a JSON object is expected"),
        (
            lambda x: x["leaves"].update({LEAF: [[4, 4]]}),
            r"leaves: w: \[\[4, 4\]\], a shape and a dtype are expected",
        ),
        (lambda x: x["leaves"].update({LEAF: [[-4], "float32"]}), r"leaves: w: \[-4\] is no shape"),
        (
            lambda x: x["leaves"].update({LEAF: [[1.5], "float32"]}),
            r"leaves: w: \[1.5\] is no shape",
        ),
        (
            lambda x: x["leaves"].update({LEAF: [[10**18] * 9, "float32"]}),
            r"leaves: w: no array has shape \[1000",
        ),
        (
            lambda x: x["leaves"].update({LEAF: [[1] * 99, "float32"]}),
            r"leaves: w: no array has shape \[1, 1",
        ),
        (lambda x: x["leaves"].update({LEAF: [[1], "object"]}), r"leaves: w: 'object' is no dtype"),
        (lambda x: x["leaves"].update({LEAF: [[1], "a, b"]}), r"leaves: w: 'a, b' is no dtype"),
        (lambda x: x | {"files": 3}, r"files = 3, a JSON object is expected"),
        (
            lambda x: x["files"].update({"arrays/../../x": [1, ""]}),
            r"files: 'arrays/../../x' is no file of a checkpoint",
        ),
        (
            lambda x: x["files"].update({"/etc/passwd": [1, ""]}),
            r"files: '/etc/passwd' is no file of a checkpoint",
        ),
        (
            lambda x: x["files"].update({"meta.json": [1]}),
            r"files: meta.json: \[1\], a size and a digest are expected",
        ),
        (
            lambda x: x["files"].update({"meta.json": ["1", ""]}),
            r"files: meta.json: \['1', ''\] is no size and digest",
        ),
        (lambda x: x["files"].pop("meta.json") and None, r"files: meta.json is missing"),
    ],
)
def test_a_manifest_of_another_form_is_refused_by_place(where, tmp_path, change, message):
    edit_manifest(where, change)
    for read in (checkpoint.read_manifest, checkpoint.read_meta, restore):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path)


@pytest.mark.parametrize(
    "text,message",
    [
        ("", r"manifest.json: not JSON"),
        ("[]", r"manifest.json holds \[\], a JSON object is expected"),
        (NESTED, r"manifest.json: nested deeper than 64 levels"),
        ('{"format": 2, "format": 1}', r"the key 'format' comes twice"),
        ('{"a": "\udcff"}', r"manifest.json: not UTF-8"),
    ],
)
def test_a_manifest_that_is_none_is_refused(where, tmp_path, text, message):
    (where / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=message):
        restore(tmp_path)


def test_a_manifest_that_was_cut_off_or_edited_is_refused(where, tmp_path):
    file = where / "manifest.json"
    text = file.read_text()
    content = json.loads(text)
    for changed in (
        text[:-20],
        text.replace('"step": 1', '"step": 7'),
        json.dumps(content, indent=1),
        text + " ",
    ):
        file.write_text(changed)
        with pytest.raises(
            CheckpointError,
            match=r"manifest.json(: not JSON| was changed after|: its digest is not its last key)",
        ):
            restore(tmp_path)
