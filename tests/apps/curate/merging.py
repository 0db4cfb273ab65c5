"""A base and two perturbed parents, which the tests of merged folders share."""

import json
import shutil

import ml_dtypes
import numpy as np
from hf_folders import MOE, random_params, tensors_of, write_folder
from safetensors.numpy import save_file

from compass_jax.apps.curate.merge import method_of
from compass_jax.apps.curate.merge_folders import merge_folders
from compass_jax.weights.hf import save_params

BF16 = ml_dtypes.bfloat16
ROUTER = "model.layers.1.mlp.gate.weight"
ENDS = ("single_word", "lstrip", "rstrip", "normalized", "special")
END = {"id": 4, "content": "<end>", **dict.fromkeys(ENDS, False)}
VOCAB = {"a": 0, "b": 1, "ab": 2, "ba": 3}
MODEL = {"type": "BPE", "vocab": VOCAB, "merges": [["a", "b"]]}
TOKENIZER = {"version": "1.0", "model": MODEL, "added_tokens": [END]}


def perturb(base, seed):
    """Returns a parent: every tensor of the base with a little noise, in float32."""
    rng = np.random.default_rng(seed)
    return {
        name: (x.astype(np.float32) + 0.1 * rng.standard_normal(x.shape)).astype(np.float32)
        for name, x in base.items()
    }


def family_of_three(where):
    """Writes base (bfloat16, 4 shards), one (bfloat16, 3 shards) and two (float32, one file) into
    `where`, each with a tokenizer.
    """
    drawn = tensors_of(save_params(random_params(MOE), MOE, where / "drawn", "float32"))
    shutil.rmtree(where / "drawn")
    base = {name: x.astype(BF16) for name, x in drawn.items()}
    one = {name: x.astype(BF16) for name, x in perturb(base, 1).items()}
    folders = (
        write_folder(where / "base", MOE, base, 4),
        write_folder(where / "one", MOE, one, 3),
        write_folder(where / "two", MOE, perturb(base, 2)),
    )
    for folder in folders:
        (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folders


def merge(folders, out, name="ties", *, weights=None, density=None, **options):
    base, *models = folders
    method = method_of(name, len(models), weights, density)
    return merge_folders(base, models, out, method, **options)


def tensors_with(folder, change):
    tensors = tensors_of(folder)
    change(tensors)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
