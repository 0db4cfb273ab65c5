"""A manifest that `save` cannot have written is refused, by file and key, by every reader of a
checkpoint.
"""

import json
import shutil

import jax.numpy as jnp
import pytest
from abstract import abstract_like
from forged import edit_manifest

from compass_jax.config import ModelConfig
from compass_jax.weights import checkpoint
from compass_jax.weights.checkpoint import CheckpointError

MODEL = ModelConfig("qwen3", 100, 32, 2, 2, 1, 16, 64)
ARRAYS = {"w": jnp.arange(12.0)}
LEAF = "w"


@pytest.fixture(scope="module")
def saved_checkpoint(tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("run"), 1, ARRAYS, {"at": 1}, model=MODEL)


@pytest.fixture
def where(saved_checkpoint, tmp_path):
    """Returns a copy of the checkpoint for each test."""
    return shutil.copytree(saved_checkpoint, tmp_path / "checkpoints" / saved_checkpoint.name)


def restore(path):
    return checkpoint.restore(path, abstract_like(ARRAYS))


NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "change,message",
    [
        *(
            (lambda x, name=name: x.pop(name) and None, f"no manifest of format 2 .*{name}")
            for name in ("step", "model", "leaves", "files")
        ),
        (lambda x: x | {"format": 1}, r"written in format 1; this version reads 2"),
        (lambda x: x | {"format": [2]}, r"written in format \[2\]"),
        (lambda x: x | {"step": "many"}, r"no manifest of format 2 .*many"),
        (lambda x: x | {"step": float("nan")}, r"manifest.json: NaN is no number of JSON"),
        (lambda x: x | {"model": []}, r"manifest.json"),
        (
            lambda x: x["model"].update(hidden="a"),
            r"manifest.json: model: hidden = 'a': the wrong type",
        ),
        (lambda x: x | {"leaves": [1]}, r"no manifest of format 2"),
        (lambda x: x["leaves"].update({LEAF: [[4, 4]]}), r"no manifest of format 2"),
        (lambda x: x | {"files": 3}, r"no manifest of format 2"),
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
        ("[]", r"manifest.json: written in format None"),
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
