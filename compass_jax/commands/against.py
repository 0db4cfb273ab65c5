"""`compass check FOLDER --against transformers`: compares the logits and greedy tokens that this
package and transformers compute for a Hugging Face folder.

A family file that reads a folder without an error can still be wrong; this comparison detects it.
Both sides compute in float32 on the CPU, from the same files and the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.base.extras import how_to_install
from compass_jax.base.records import Prompt
from compass_jax.base.token_ids import end_ids
from compass_jax.commands.check import CheckError
from compass_jax.config import ComputeConfig, ModelConfig, RolloutConfig
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.model.families.raw import WeightsError
from compass_jax.model.logprobs import head_weights, logits_of
from compass_jax.model.params import to_decode
from compass_jax.model.transformer import Transformer, apply
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.weights.hf import load_params
from compass_jax.weights.hf_config import read_hf_config, read_json

TEXT = (
    "The capital of France is Paris, and the capital of Italy is Rome. To add 27 and 15, add the"
    " tens first: 20 + 10 = 30. Then add the ones: 7 + 5 = 12. The sum is 42. def add(a, b):\n"
    "    return a + b\n\nWater boils at 100 degrees Celsius, which is 212 degrees Fahrenheit."
)
LENGTH, PROMPT, NEW = 128, 16, 32  # numbers of tokens: a row, the greedy prompt, its continuation
TOLERANCE = 1e-3  # share of the standard deviation of transformers' logits


class Outputs(NamedTuple):
    """A model's logits `[2 t v]` of the rows, and its greedy continuation of row 0's start."""

    logits: np.ndarray
    greedy: list[int]


def run_against(path: str | Path, family: str | None = None) -> bool:
    """Prints the differences of a folder's logits and greedy tokens from those of transformers, and
    returns whether they agree.

    Raises CheckError for a folder that cannot be compared.
    """
    folder = Path(path).absolute()
    if not (folder / "config.json").is_file() or (folder / "checkpoints").is_dir():
        raise CheckError(
            f"{path} is no Hugging Face folder, which --against transformers compares: write one"
            " with compass export-hf"
        )
    torch, transformers = _packages()
    config = read_hf_config(folder, family)
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer_config.json").is_file() else None
    rows = _rows(config, tokenizer)
    ends = end_ids(folder, WeightsError) if tokenizer is None else tokenizer.end_ids
    reference = _by_transformers(torch, transformers, folder, rows, ends)
    computed = _computed_here(folder, config, rows, ends)
    return _report(computed, reference, tokenizer, f"{path}", transformers.__version__)


def _packages() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        how = how_to_install("transformers", "torch", "transformers")
        raise CheckError(
            f"--against transformers needs the extra 'transformers' ({error}): {how}"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers


def _rows(config: ModelConfig, tokenizer: Tokenizer | None) -> np.ndarray:
    """Returns two rows of tokens: one of a text (random without a tokenizer), and a random one."""
    length = min(LENGTH, config.max_positions)
    rows = np.random.default_rng(0).integers(0, config.vocab_size, (2, length))
    text = [] if tokenizer is None else tokenizer.encode(TEXT)[:length]
    rows[0, : len(text)] = text
    return rows.astype(np.int32)


def _prompt(rows: np.ndarray) -> np.ndarray:
    return rows[0, : min(PROMPT, rows.shape[1] // 2)]


def _by_transformers(
    torch: Any, transformers: Any, folder: Path, rows: np.ndarray, ends: tuple[int, ...] | list[int]
) -> Outputs:
    """Returns the outputs of transformers. Never runs code from the folder."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            **_dequantization(transformers, folder),
        ).eval()
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else repr(error)
        raise CheckError(f"transformers cannot load {folder}: {reason}") from error
    with torch.no_grad():
        logits = model(torch.tensor(rows, dtype=torch.long)).logits.float().numpy()
        tokens, greedy = torch.tensor(_prompt(rows)[None], dtype=torch.long), list[int]()
        while len(greedy) < _new(rows) and not (greedy and greedy[-1] in ends):
            token = model(tokens, use_cache=False).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, token], dim=1)
            greedy.append(int(token))
    return Outputs(logits, greedy)


def _dequantization(transformers: Any, folder: Path) -> dict[str, Any]:
    """Returns the argument with which transformers reads quantised weights as floats."""
    quantization = read_json(folder / "config.json").get("quantization_config")
    if quantization is None:
        return {}
    kinds = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}
    return {"quantization_config": kinds[quantization["quant_method"]](dequantize=True)}


def _new(rows: np.ndarray) -> int:
    return min(NEW, rows.shape[1] - len(_prompt(rows)))


def _computed_here(
    folder: Path, config: ModelConfig, rows: np.ndarray, ends: tuple[int, ...] | list[int]
) -> Outputs:
    """Returns the logits of the training's forward pass, and the tokens that the engine samples."""
    params, model = load_params(folder, config, "float32"), Transformer(config)

    @jax.jit
    def forward(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return apply(model, params, tokens, positions, mask=jnp.ones(tokens.shape, bool)).hidden

    hidden = forward(params, jnp.asarray(rows))
    logits = np.asarray(logits_of(hidden, head_weights(params)))
    rollout = RolloutConfig(slots=1, prompt_buckets=(PROMPT,), max_new_tokens=_new(rows))
    engine = Engine(config, ComputeConfig(), rollout, ends)
    prompt = Prompt(0, 0, "", "", _prompt(rows), "")
    job = Collection(
        engine, to_decode(params), [prompt], 1, Purpose.EVAL, 0, sampler=Sampler(temperature=0.0)
    )
    (rollout_of_prompt,) = job
    return Outputs(logits, rollout_of_prompt.response.tolist())


def _report(
    computed: Outputs, reference: Outputs, tokenizer: Tokenizer | None, path: str, version: str
) -> bool:
    """Prints the differences of the outputs, and returns whether they agree."""
    std = float(reference.logits.std())
    difference = float(np.abs(computed.logits - reference.logits).max())
    equal = difference <= TOLERANCE * std  # false for NaN
    rows = " x ".join(map(str, reference.logits.shape[:2]))
    print(
        f"{'equal' if equal else 'differ':<8} logits: largest difference {difference:.2e}, std of"
        f" transformers' logits {std:.3g}, allowed {TOLERANCE * std:.2e} ({rows} tokens)"
    )
    at = _first_difference(computed.greedy, reference.greedy)
    if at is None:
        print(f"equal    greedy: {len(reference.greedy)} tokens")
    else:
        left, right = (_token_text(x.greedy, at, tokenizer) for x in (computed, reference))
        print(f"differ   greedy: token {at + 1} is {left} here, {right} in transformers {version}")
    agree = equal and at is None
    remedy = "" if agree else "; what does the family file leave out? (docs/howto/family.md)"
    print(f"{path}: {'as in' if agree else 'not as in'} transformers {version}{remedy}", flush=True)
    return agree


def _first_difference(computed: list[int], reference: list[int]) -> int | None:
    pairs = zip([*computed, None], [*reference, None], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def _token_text(tokens: list[int], at: int, tokenizer: Tokenizer | None) -> str:
    if at >= len(tokens):
        return "absent"
    text = "" if tokenizer is None else f" {tokenizer.decode([tokens[at]], special=True)!r}"
    return f"{tokens[at]}{text}"
