"""What faults are done to: sound folders, made once for a campaign and copied for a case; and how
a case runs commands.

WORLD/files      rows.jsonl, chats.jsonl, tokenizer/, hf/      written here, by no code under test
WORLD/runs/NAME  runs and checkpoints that the commands made, each when it is first asked for
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import fork
from .words import Ended

HERE = Path(__file__).parent
CONFIG = str(HERE / "tiny.py")
ROWS = [
    {"prompt": f"What is {n} + {m}?", "answer": str(n + m)}
    for n, m in ((3, 4), (10, 5), (7, 8), (21, 2), (9, 9), (30, 12))
]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": f"It is {row['answer']}."},
        ]
    }
    for row in ROWS
]


class World:
    """The folder of a campaign, shared by its processes; what is missing in it is made under a
    name of its own, then renamed.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = folder / "files"

    def build(self) -> None:
        """Writes the sound files."""
        if self.files.exists():
            return
        made = self.folder / f".files.{os.getpid()}"
        made.mkdir(parents=True)
        write_lines(made / "rows.jsonl", ROWS)
        write_lines(made / "chats.jsonl", CHATS)
        shutil.copytree(HERE.parent.parent / "configs" / "tiny_tokenizer", made / "tokenizer")
        write_model(made / "hf", made / "tokenizer")
        made.rename(self.files)

    def made(self, name: str, argv: list[str], spy: fork.Spy | None = None) -> Path:
        """The folder in which `compass ARGV` ran, made when it is first asked for. AssertionError
        where it failed.
        """
        final = self.folder / "runs" / name
        if final.exists():
            return final
        made = self.folder / "runs" / f".{name}.{os.getpid()}"
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(self.files, made)
        said = self.folder / "said" / f"{name}.{os.getpid()}"
        ended = fork.start(argv, made, said, fork.Limits(seconds=300, cpu_s=300), spy).wait()
        assert ended.status == 0, (
            f"the undisturbed {argv} failed with {ended.status}: {ended.err[-3000:]}"
        )
        (made / "ended.json").write_text(
            json.dumps({"out": ended.out, "outcome": plain(ended.outcome)})
        )
        try:
            made.rename(final)
        except OSError:  # another process was faster
            shutil.rmtree(made)
        return final

    def outcome(self, name: str, argv: list[str], spy: fork.Spy | None = None) -> Any:
        """The outcome of the undisturbed command."""
        return json.loads((self.made(name, argv, spy) / "ended.json").read_text())["outcome"]


def plain(outcome: Any) -> Any:
    """An outcome for JSON; None where none was taken."""
    return outcome if isinstance(outcome, (dict, list, str, int, float)) else None


@dataclass
class Case:
    """One fault: where it is done, its own random numbers, and what was done, in words."""

    seed: int
    index: int
    area: str
    folder: Path
    world: World
    rng: random.Random = field(init=False)
    told: list[str] = field(default_factory=list)
    ran: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.area} {self.seed} {self.index}")

    def tell(self, text: str) -> None:
        """Adds to the description of the fault."""
        self.told.append(text)

    def bring(self, *names: str, source: Path | None = None) -> None:
        """Copies sound files or folders into the case's folder."""
        for name in names:
            origin = (source or self.world.files) / name
            if origin.is_dir():
                shutil.copytree(origin, self.folder / name, symlinks=True)
            else:
                shutil.copy(origin, self.folder / name)

    def start(
        self, argv: list[str], spy: fork.Spy | None = None, cwd: Path | None = None, **options: Any
    ) -> fork.Child:
        """Starts a command in the case's folder."""
        self.ran += 1
        before: Callable[[], None] | None = options.pop("before", None)
        said = self.folder / f"said_{self.ran}"
        return fork.start(argv, cwd or self.folder, said, fork.Limits(**options), spy, before)

    def compass(self, argv: list[str], spy: fork.Spy | None = None, **options: Any) -> Ended:
        """Runs a command to its end."""
        return self.start(argv, spy, **options).wait()


def write_lines(file: Path, rows: list[Any]) -> None:
    """A JSONL file."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


# ---- a Hugging Face folder, from the format's own description
# ------------------------------------------------------------

HF_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 338,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "use_cache": True,
    "torch_dtype": "float32",
    "attention_bias": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the model of `HF_CONFIG`."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (338, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (338, 16),
    }
    for i in range(2):
        layer = f"model.layers.{i}"
        attention = {
            "q_proj": (16, 16),
            "k_proj": (8, 16),
            "v_proj": (8, 16),
            "o_proj": (16, 16),
            "q_norm": (8,),
            "k_norm": (8,),
        }
        shapes |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {
            f"{layer}.{name}.weight": (16,)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        shapes[f"{layer}.mlp.gate.weight"] = (4, 16)
        for e in range(4):
            expert = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}
            shapes |= {
                f"{layer}.mlp.experts.{e}.{name}.weight": shape for name, shape in expert.items()
            }
    return shapes


def tensors() -> dict[str, np.ndarray]:
    """Weights of the model, float32."""
    rng = np.random.default_rng(16)
    out = {}
    for name, shape in tensor_shapes().items():
        out[name] = (
            rng.standard_normal(shape) * (0.1 if len(shape) == 1 else 0.5)
            + (1 if len(shape) == 1 else 0)
        ).astype("<f4")
    return out


def write_safetensors(
    file: Path, values: dict[str, np.ndarray], change: Callable[[dict], Any] | None = None
) -> None:
    """A safetensors file; `change` may change its header first, or return other bytes for it."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, value in values.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(value.shape),
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    text = (change(header) if change else None) or json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(value.tobytes() for value in values.values())
    )


def read_safetensors(folder: Path) -> dict[str, str]:
    """Tensor -> digest of its shape, type and bytes, of all files of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = (8 + size + at for at in entry["data_offsets"])
                head = f"{entry['dtype']} {entry['shape']} ".encode()
                found[name] = hashlib.sha256(head + data[begin:end]).hexdigest()[:16]
    return dict(sorted(found.items()))


def write_model(folder: Path, tokenizer: Path) -> None:
    """The sound Hugging Face folder: two shards and their index."""
    shutil.copytree(tokenizer, folder)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG, indent=2))
    values = tensors()
    names = list(values)
    parts = {
        "model-00001-of-00002.safetensors": names[:30],
        "model-00002-of-00002.safetensors": names[30:],
    }
    for file, part in parts.items():
        write_safetensors(folder / file, {name: values[name] for name in part})
    index = {name: file for file, part in parts.items() for name in part}
    total = sum(value.nbytes for value in values.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
