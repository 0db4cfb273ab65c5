"""The documented meaning of every setting, by hand: its type and its range; and words within and
outside it.
"""

from __future__ import annotations

import json
import re
from typing import Any

HUGE = 10**12  # beyond this a setting may be refused as absurd


# pattern of keys -> (kind, least, most, whether the ends belong); None: any finite number
DOMAINS: list[tuple[str, tuple]] = [
    (r"seed", ("int", 0, 2**32 - 1)),
    (r"keep_checkpoints|(rollout_)?mesh\.\w+", ("int", 1, HUGE)),
    (
        r"model\.(vocab_size|hidden|layers|heads|kv_heads|head_dim|ffn|max_positions)|model\.moe\.(top_k|ffn|sparse_step)",
        ("int", 1, HUGE),
    ),
    (r"model\.moe\.experts", ("int", 2, HUGE)),
    (r"model\.(rope_theta|norm_eps)", ("positive", HUGE)),
    (r"model\.init_std", ("not negative", HUGE)),
    (
        r"rollout\.(slots|max_new_tokens|tokens_per_call|cache_bucket|page_tokens|prefill_chunk)",
        ("int", 1, HUGE),
    ),
    (r"rollout\.cache_pages|(rollout|evaluation)\.top_k|data\.eval_prompts", ("int", 0, HUGE)),
    (r"(rollout|evaluation)\.temperature", ("positive", HUGE)),
    (r"(rollout|evaluation)\.top_p", ("share", False, True)),
    (r"data\.heldout_frac", ("share", True, False)),
    (r"rewards\.workers|evaluation\.k|data\.sources\.0\.(repeat|size)", ("int", 1, HUGE)),
    (r"rewards\.(timeout_s|smallest_gap)", ("positive", HUGE)),
    (r"rewards\.(right_at|wrong_at)", ("finite",)),
    (
        r"(sft|rl)\.(steps|batch|micro_batch_tokens|prompts_per_step|updates_per_rollout|epochs)",
        ("int", 1, HUGE),
    ),
    (r"rl\.group_size", ("int", 2, HUGE)),
    (
        r"(sft|rl)\.save_every|rl\.(eval_every|partial_prompts)|rl\.zero_variance\.grow_to|rl\.shaping\.length_free_tokens",
        ("int", 0, HUGE),
    ),
    (r"(sft|rl)\.optim\.(warmup_steps)", ("int", 0, HUGE)),
    (r"(sft|rl)\.optim\.max_bad_steps|rl\.zero_variance\.dynamic_(batch|rounds)", ("int", 1, HUGE)),
    (r"rl\.shaping\.(repetition_ngram|overlong_buffer_tokens)", ("int", 1, HUGE)),
    (
        r"(sft|rl)\.optim\.(learning_rate|weight_decay)|sft\.router_aux_coef|rl\.shaping\.\w+_penalty",
        ("not negative", HUGE),
    ),
    (
        r"rl\.objective\.(clip_low|clip_high|dual_clip|kl_coef|router_aux_coef)",
        ("not negative", HUGE),
    ),
    (
        r"(sft|rl)\.optim\.(clip_grad_norm|eps)|rl\.objective\.(alpha|floor|ratio_max)",
        ("positive", HUGE),
    ),
    (
        r"rl\.correction\.tis_cap|rl\.zero_variance\.(rl_zvp_alpha|grow_temperature)",
        ("positive", HUGE),
    ),
    (r"(sft|rl)\.optim\.b[12]", ("share", True, False)),
    (r"rollout\.prompt_buckets|(sft|rl)\.buckets", ("increasing",)),
]


MAY_CHANGE = re.compile(
    r"(run_dir|keep_checkpoints|data\.cache|sft\.bad_rows|(rl|sft)\.(steps|save_every)|rl\.eval_every|mesh\..*|rollout_mesh.*|rollout_apart)$"
)


CHOICES = {
    "model.family": {"qwen3_moe", "qwen3", "qwen2"},
    "rl.replay": {"off", "R2", "R3"},
    "rollout.quantize": {"off", "e4m3", "int8", "auto"},
    "rollout.kv_quantize": {"off", "e4m3", "int8"},
    "rl.correction.name": {"off", "tis", "icepop", "sequence"},
    "rl.objective.name": {"grpo", "gspo", "cispo", "espo"},
    "rl.optim.schedule": {"constant", "cosine"},
    "compute.dtype": {"float32", "bfloat16", "float64"},
    "compute.param_dtype": {"float32", "bfloat16", "float64"},
}


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Dotted key -> value; lists of objects by number."""
    if isinstance(value, dict):
        parts = {k: v for k, v in value.items()}
    elif isinstance(value, list) and any(isinstance(x, dict) for x in value):
        parts = {str(i): x for i, x in enumerate(value)}
    else:
        return {key: value}
    out: dict[str, Any] = {}
    for name, part in parts.items():
        out |= flat(part, f"{key}.{name}" if key else name)
    return out


def domain(key: str) -> tuple | None:
    """What is documented of a setting."""
    return next((found for pattern, found in DOMAINS if re.fullmatch(pattern, key)), None)


def legal_words(rng, kind: tuple) -> tuple[list[str], Any]:
    """(words, value) within a domain."""
    if kind[0] == "int":
        value = rng.choice(
            [
                kind[1],
                kind[1] + 1,
                min(kind[2], kind[1] + rng.randrange(1, 2000)),
                rng.randrange(kind[1], min(kind[2], 1 << 33)),
            ]
        )
        return [rng.choice([str(value), f"+{value}"]) if value else "0"], value
    if kind[0] == "increasing":
        values = sorted(rng.sample(range(2, 4000), rng.randrange(1, 4)))
        return [str(x) for x in values], values
    if kind[0] == "share":
        value = rng.choice(
            [
                rng.random() or 0.5,
                0.5,
                0.999999,
                *([0.0] if kind[1] else []),
                *([1.0] if kind[2] else []),
            ]
        )
    else:
        value = rng.choice([1.0, 0.1, 1e-9, rng.random() * 100 + 1e-3, 3.0])
    return [repr(value)], value


def illegal_words(rng, kind: tuple) -> list[str]:
    """Words outside a domain."""
    odd = [
        "",
        "abc",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "3,5",
        "0x10",
        "None",
        "[",
        "-1",
        "\udc80",
        "--",
        "1 2",
    ]
    if kind[0] == "int":
        odd += ["1.5", "1e3", str(kind[1] - 1), "-9" * 30, "true"] + (
            [str(kind[2] + 1)] if kind[2] != HUGE else []
        )
    elif kind[0] == "increasing":
        return rng.choice(
            [
                ["0"],
                ["-5"],
                ["8", "8"],
                ["9", "8"],
                ["a"],
                ["nan"],
                [],
                ["4", "x"],
                ["1.5"],
                ["8", ""],
            ]
        )
    elif kind[0] == "share":
        odd += ["-0.1", "1.1", *([] if kind[1] else ["0"]), *([] if kind[2] else ["1"])]
    elif kind[0] == "finite":
        odd.remove("-1")
    elif kind[0] == "positive":
        odd += ["0", "-0.5"]
    return [rng.choice(odd)]


def defaults() -> dict[str, Any]:
    """What a setting is where config.json leaves it out: RunConfig's own defaults, around the
    smallest model.
    """
    from compass_jax.config import DataConfig, FileSource, ModelConfig, MoEConfig, RunConfig
    from compass_jax.config.io import config_to_json

    model = ModelConfig("qwen3_moe", 1, 1, 1, 1, 1, 2, 1, moe=MoEConfig(2, 1, 1))
    found = flat(
        json.loads(config_to_json(RunConfig("", model, data=DataConfig(sources=(FileSource(""),)))))
    )
    required = re.compile(
        r"name|model\.(family|vocab_size|hidden|layers|heads|kv_heads|head_dim|ffn|moe\.(experts|top_k|ffn))|data\.sources.*\.path|.*kind"
    )
    return {key: value for key, value in found.items() if not required.fullmatch(key)}
