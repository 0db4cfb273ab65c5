"""Adapters in PEFT's format: export of a run's, and merging of folders into their base.

A folder has adapter_config.json and adapter_model.safetensors, with lora_A [r, in] and lora_B
[out, r] of each module (LoRA, arXiv 2106.09685): W + scale * B A. transformers 5 has the routed
experts of a layer in two parameters, gate_up_proj and down_proj, whose factors are lora_A [e r, in]
and lora_B [out, r e] (PEFT's `target_parameters`). The factors of gate and up are one pair of twice
the rank. PEFT reads this layout from 0.19 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.config import ConfigError, ModelConfig
from compass_jax.config.lora import LoRAConfig
from compass_jax.devices.sharding import fetch
from compass_jax.model.families.find import built_in, find
from compass_jax.model.families.raw import UnsupportedModel, WeightsError
from compass_jax.model.lora import Adapter, adapter_specs
from compass_jax.model.params import layer_runs
from compass_jax.weights import checkpoint
from compass_jax.weights.adapters import LORA, abstract_adapters, settings_of
from compass_jax.weights.average import average_notice, weights_key
from compass_jax.weights.carried import carry_files
from compass_jax.weights.dequantize import refuse_quantized
from compass_jax.weights.hf_config import read_json
from compass_jax.weights.new_folder import new_folder
from compass_jax.weights.peft_modules import check_modules
from compass_jax.weights.safetensors_io import (
    Stored,
    finite,
    open_file,
    read_headers,
    shard_files,
    write_json,
    write_shards,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings of PEFT that change the product, and their values in which it is W + scale * B A
_PLAIN: Mapping[str, tuple[Tree, ...]] = {
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": ([], None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), (None, [])),
    **dict.fromkeys(("use_bdlora", "arrow_config", "kasa_config", "monteclora_config"), (None,)),
    # the others, such as PiSSA's, change the base too; peft writes true for a converted adapter
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}
# the module in the classes of all built-in families in transformers 5
_EXPERTS = "model.layers.{i}.mlp.experts"
_PARTS = 2  # matrices of an expert in gate_up_proj


def export_adapter(
    path: str | Path, out: str | Path, tell: Callable[[str], None] = lambda line: None
) -> Path:
    """Writes the adapters of a run or checkpoint as a PEFT folder; returns its path. Tells a line
    where they are the average that the run kept.

    Raises WeightsError for a checkpoint without adapters, and UnsupportedModel for adapters of
    experts in a family that is not built in: the names in its class are unknown.
    """
    source = checkpoint.find(path)
    saved = source.meta().get(LORA)
    if saved is None:
        raise WeightsError(f"{source.path} has no adapters: export the whole model instead")
    model, lora = source.manifest.model, settings_of(saved)
    key = weights_key(source)
    if line := average_notice(source.path):
        tell(line)
    requested = {"state": {key: abstract_adapters(model, lora)}}
    _, arrays, _ = checkpoint.restore(source, requested, subset=True)
    return write_adapter(out, arrays["state"][key], model, lora, saved["base"])


def write_adapter(
    out: str | Path, adapters: Tree, model: ModelConfig, lora: LoRAConfig, base: str
) -> Path:
    """Writes stacked adapters as a PEFT folder, which names its `base`; returns its path. Raises
    UnsupportedModel as `export_adapter` does.
    """
    tensors = peft_tensors(adapters, model, lora)
    times = _PARTS if "experts" in lora.targets else 1
    modules = sorted({_module(name) for name in tensors if ".experts." not in name})
    # Where transformers 5 renamed the experts, PEFT confuses dense modules of the same name with
    # them. It does not rename parameters.
    is_moe = model.moe is not None
    by_parameter = [
        x for x in modules if is_moe and x.endswith(("gate_proj", "up_proj", "down_proj"))
    ]
    parameters = [f"{module}.weight" for module in by_parameter]
    if "experts" in lora.targets:
        parameters += ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        # PEFT scales by lora_alpha / r: both are multiplied, which keeps the scale.
        "r": times * lora.rank,
        "lora_alpha": times * lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(set(modules) - set(by_parameter)),
        **({"target_parameters": parameters} if parameters else {}),
    }
    folder = Path(out).absolute()
    with new_folder(folder, sum(x.nbytes for x in tensors.values())) as temporary:
        save_file(tensors, temporary / WEIGHTS, {"format": "pt"})
        write_json(temporary / CONFIG, config)
    return folder


def _module(name: str) -> str:
    """Returns the module of an adapter's tensor, such as model.layers.0.self_attn.q_proj."""
    return name.removeprefix(_PREFIX).rpartition(".lora_")[0]


def peft_tensors(adapters: Tree, config: ModelConfig, lora: LoRAConfig) -> dict[str, np.ndarray]:
    """Returns stacked adapters as PEFT's tensors: of rank r, and with experts of rank _PARTS r,
    filled with zeros.
    """
    ranks = lora.rank * (_PARTS if "experts" in lora.targets else 1)
    family, runs = find(config.family), layer_runs(config)
    specs = jax.tree_util.tree_flatten_with_path(
        adapter_specs(config, lora), is_leaf=lambda x: isinstance(x, Adapter)
    )[0]
    pairs = jax.tree.leaves(adapters, is_leaf=lambda x: isinstance(x, Adapter))
    tensors: dict[str, np.ndarray] = {}
    experts: dict[int, dict[str, Adapter]] = {}  # layer -> parameter -> factors of all experts
    for (path, spec), pair in zip(specs, pairs, strict=True):
        run, offset = (int(key.key.rpartition("_")[2]) for key in path[:2])
        a, b = (np.asarray(fetch(x)) for x in pair)
        for repeat in range(len(a)):
            layer, factors = runs[run].layer(repeat, offset), Adapter(a[repeat], b[repeat])
            if spec.a.per_expert:
                experts.setdefault(layer, {})[spec.a.name] = factors
                continue
            module = family.tensor(spec.a.name).name.format(i=layer).removesuffix(".weight")
            factors = Adapter(factors.a[None], factors.b[None])
            tensors |= _pair(module, [factors], ranks)
    if experts and config.family not in built_in():
        raise UnsupportedModel(
            f"adapters of experts of the family {config.family}: PEFT's names for them are known"
            " for built-in families only; export the merged model instead"
        )
    is_interleaved = family.tensor("moe.gate").columns[1] > 1 if experts else False
    for layer, parts in experts.items():
        module = _EXPERTS.format(i=layer)
        # PEFT wraps a module once for each of its parameters: down_proj is the outer wrapper
        gate_up = [parts["moe.gate"], parts["moe.up"]]
        tensors |= _pair(f"{module}.base_layer", gate_up, ranks, is_interleaved)
        tensors |= _pair(module, [parts["moe.down"]], ranks)
    return tensors


def _pair(
    module: str, parts: Sequence[Adapter], ranks: int, is_interleaved: bool = False
) -> dict[str, np.ndarray]:
    """Returns lora_A [e * ranks, inputs] and lora_B [outputs, ranks * e] of a module, or of a
    parameter that has the outputs of several matrices of each expert, one after the other or
    interleaved.
    """
    (experts, inputs, rank), outputs = parts[0].a.shape, parts[0].b.shape[-1]
    a = np.zeros((experts, ranks, inputs), parts[0].a.dtype)
    b = np.zeros((len(parts) * outputs, ranks, experts), parts[0].b.dtype)
    for i, part in enumerate(parts):
        filled = slice(i * rank, (i + 1) * rank)
        block = slice(i * outputs, (i + 1) * outputs)
        rows = slice(i, None, len(parts)) if is_interleaved else block
        a[:, filled] = part.a.swapaxes(1, 2)
        # [o r e]: PEFT orders the columns of lora_B by rank and then expert, the rows of lora_A by
        # expert and then rank.
        b[rows, filled] = part.b.transpose(2, 1, 0)
    return {
        f"{_PREFIX}{module}.lora_A.weight": a.reshape(-1, inputs),
        f"{_PREFIX}{module}.lora_B.weight": b.reshape(len(b), -1),
    }


class PeftAdapter(NamedTuple):
    """An adapter folder: the factors of each module, and the scale of their product."""

    folder: Path
    factors: dict[str, tuple[np.ndarray, np.ndarray]]  # tensor of the base -> (A, B)
    scale: float
    config: JsonObject  # adapter_config.json


def read_adapter(folder: str | Path) -> PeftAdapter:
    """Returns a PEFT folder's adapter. Raises UnsupportedModel, naming all reasons, for one that is
    not W + scale * B A; WeightsError for missing or malformed files.
    """
    folder = Path(folder)
    raw = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
    if raw is None:
        raise WeightsError(f"{folder} has no {CONFIG}: the folder of a PEFT adapter is expected")
    problems = [f"{key} = {raw[key]}" for key, plain in _PLAIN.items() if raw.get(key) not in plain]
    if raw.get("peft_type") != "LORA":
        problems.insert(0, f"peft_type = {raw.get('peft_type')!r}")
    if experts := [x for x in raw.get("target_parameters") or [] if not x.endswith(".weight")]:
        problems.append(f"target_parameters = {experts}")
    if problems:
        raise UnsupportedModel(
            f"{folder / CONFIG}: {', '.join(problems)} is not supported (supported: plain LoRA on"
            " an unchanged base); merge it with peft's merge_and_unload()"
        )
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise WeightsError(f"{folder / CONFIG}: r = {rank!r}, lora_alpha = {alpha!r}: two numbers")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{folder / WEIGHTS} could not be read: {error}") from error
    factors = {}
    for name in sorted(name for name in tensors if name.endswith(".lora_A.weight")):
        a, b = tensors.pop(name), tensors.pop(name.replace(".lora_A.", ".lora_B."), None)
        if b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise WeightsError(f"{folder / WEIGHTS}: {name}: no pair of matrices of rank {rank}")
        factors[f"{_module(name)}.weight"] = (a.astype(np.float32), b.astype(np.float32))
    if tensors:
        raise UnsupportedModel(
            f"{folder / WEIGHTS} has {sorted(tensors)[0]}, which is no factor of a LoRA adapter"
        )
    scale = alpha / rank**0.5 if raw.get("use_rslora") else alpha / rank
    return PeftAdapter(folder, factors, float(scale), raw)


def merge_adapters(
    base: str | Path,
    adapters: Sequence[str | Path],
    out: str | Path,
    weights: Sequence[float] = (),
) -> Path:
    """Writes the model W + sum over adapters of weight * scale * B A as a Hugging Face folder;
    returns its path. One tensor is in memory at a time, and one shard while it is written.

    Args:
        base: the Hugging Face folder that the adapters were trained on.
        adapters: PEFT folders.
        out: the new folder.
        weights: one for each adapter; empty: 1 each.

    Raises ConfigError for another number of weights, and the errors of `read_adapter`; WeightsError
    for an adapter of another base, and for one whose file has other modules than its configuration
    names.
    """
    weights = list(weights) or [1.0] * len(adapters)
    if not adapters or len(weights) != len(adapters):
        raise ConfigError(
            f"--weights has {len(weights)} numbers for {len(adapters)} adapters: give one for each"
        )
    base, folder = Path(base), Path(out).absolute()
    stored, parts = read_headers(base), [read_adapter(adapter) for adapter in adapters]
    refuse_quantized(base, stored)
    for part in parts:
        _check_fits(part, stored, base)
    sizes = {
        name: int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize for name, x in stored.items()
    }
    with new_folder(folder, sum(sizes.values())) as temporary:
        write_shards(temporary, shard_files(sizes), _merged(stored, parts, weights))
        write_json(temporary / "config.json", read_json(base / "config.json"))
        carry_files(base, temporary)
    return folder


def _check_fits(part: PeftAdapter, stored: Mapping[str, Stored], base: Path) -> None:
    for name, (a, b) in part.factors.items():
        shape = stored[name].shape if name in stored else None
        if shape != (b.shape[0], a.shape[1]):
            has = "lacks it" if shape is None else f"has {list(shape)}"
            raise WeightsError(
                f"{part.folder} is an adapter of another base: it changes {name}"
                f" {[b.shape[0], a.shape[1]]}, and {base} {has}"
            )
    matrices = [name for name, x in stored.items() if len(x.shape) == 2]
    modules = {x.removesuffix(".weight") for x in matrices if x.endswith(".weight")}
    held_modules = {name.removesuffix(".weight") for name in part.factors}
    check_modules(part.config, held_modules, modules, str(part.folder))


def _merged(
    stored: Mapping[str, Stored], parts: Sequence[PeftAdapter], weights: Sequence[float]
) -> Iterator[np.ndarray]:
    for name, place in stored.items():
        with open_file(place.file) as handle:
            values = place.read(handle, name, (slice(None),) * len(place.shape))
        deltas = [
            weight * part.scale * (part.factors[name][1] @ part.factors[name][0])
            for part, weight in zip(parts, weights, strict=True)
            if name in part.factors
        ]
        if deltas:
            # In float32: adapters change less than bfloat16 resolves.
            wide = values.astype(np.float32) + sum(deltas)
            values = finite(wide, values.dtype, f"{place.file}: tensor {name} with its adapters")
        yield values
