"""Faults of the configuration: options on the command line, and config.json of a run directory.

The documented meaning of every setting is in `DOMAINS`, by hand. An option is drawn legal or not: what is not has to be refused; what is
legal may be accepted (then `--dry-run` must print this value and no other change) or refused by words, where two settings disagree.
"""

from __future__ import annotations

import json
import re
from typing import Any

from . import spies
from .strict import ODD_TEXTS, damage_bytes, damage_json, odd_encoding, strict_json
from .words import NOT_TAKEN, Ended, Expected, Verdict, judge
from .world import CONFIG, Case

SHARE = 22
HUGE = 10**12  # beyond this a setting may be refused as absurd

# pattern of keys -> (kind, least, most, whether the ends belong); None: any finite number
DOMAINS: list[tuple[str, tuple]] = [
    (r"seed", ("int", 0, 2**32 - 1)),
    (r"keep_checkpoints|(rollout_)?mesh\.\w+", ("int", 1, HUGE)),
    (r"model\.(vocab_size|hidden|layers|heads|kv_heads|head_dim|ffn|max_positions)|model\.moe\.(top_k|ffn|sparse_step)", ("int", 1, HUGE)),
    (r"model\.moe\.experts", ("int", 2, HUGE)),
    (r"model\.(rope_theta|norm_eps)", ("positive", HUGE)),
    (r"model\.init_std", ("not negative", HUGE)),
    (r"rollout\.(slots|max_new_tokens|tokens_per_call|cache_bucket|page_tokens|prefill_chunk)", ("int", 1, HUGE)),
    (r"rollout\.cache_pages|(rollout|evaluation)\.top_k|data\.eval_prompts", ("int", 0, HUGE)),
    (r"(rollout|evaluation)\.temperature", ("positive", HUGE)),
    (r"(rollout|evaluation)\.top_p", ("share", False, True)),
    (r"data\.heldout_frac", ("share", True, False)),
    (r"rewards\.workers|evaluation\.k|data\.sources\.0\.(repeat|size)", ("int", 1, HUGE)),
    (r"rewards\.(timeout_s|smallest_gap)", ("positive", HUGE)),
    (r"rewards\.(right_at|wrong_at)", ("finite",)),
    (r"(sft|rl)\.(steps|batch|micro_batch_tokens|prompts_per_step|updates_per_rollout|epochs)", ("int", 1, HUGE)),
    (r"rl\.group_size", ("int", 2, HUGE)),
    (r"(sft|rl)\.(save_every|eval_every)|rl\.partial_prompts|rl\.zero_variance\.grow_to|rl\.shaping\.length_free_tokens", ("int", 0, HUGE)),
    (r"(sft|rl)\.optim\.(warmup_steps)", ("int", 0, HUGE)),
    (r"(sft|rl)\.optim\.max_bad_steps|rl\.zero_variance\.dynamic_(batch|rounds)", ("int", 1, HUGE)),
    (r"rl\.shaping\.(repetition_ngram|overlong_buffer_tokens)", ("int", 1, HUGE)),
    (r"(sft|rl)\.optim\.(learning_rate|weight_decay)|sft\.router_aux_coef|rl\.shaping\.\w+_penalty", ("not negative", HUGE)),
    (r"rl\.objective\.(clip_low|clip_high|dual_clip|kl_coef|router_aux_coef)", ("not negative", HUGE)),
    (r"(sft|rl)\.optim\.(clip_grad_norm|eps)|rl\.objective\.(espo_alpha|espo_floor|cispo_ratio_max)", ("positive", HUGE)),
    (r"rl\.correction\.tis_cap|rl\.zero_variance\.(rl_zvp_alpha|grow_temperature)", ("positive", HUGE)),
    (r"(sft|rl)\.optim\.b[12]", ("share", True, False)),
    (r"rollout\.prompt_buckets|(sft|rl)\.buckets", ("increasing",)),
]
MAY_CHANGE = re.compile(r"(run_dir|keep_checkpoints|(rl|sft)\.(steps|save_every|eval_every)|mesh\..*|rollout_mesh.*|rollout_apart)$")
CHOICES = {
    "model.family": {"qwen3_moe", "qwen3", "qwen2"}, "rl.replay": {"off", "R2", "R3"}, "rollout.quantize": {"off", "e4m3", "int8", "auto"},
    "rollout.kv_quantize": {"off", "e4m3", "int8"}, "rl.correction.name": {"off", "tis", "icepop", "sequence"},
    "rl.objective.name": {"grpo", "dapo", "dr_grpo", "gspo", "cispo", "espo"}, "rl.optim.schedule": {"constant", "cosine"},
    "compute.dtype": {"float32", "bfloat16", "float64"}, "compute.param_dtype": {"float32", "bfloat16", "float64"},
}  # fmt: skip


def run(case: Case) -> Verdict:
    """One fault of an option, or of config.json."""
    base = baseline(case)
    return _option(case, base) if case.rng.random() < 0.6 else _run_config(case, base)


def baseline(case: Case) -> dict:
    """The undisturbed configuration, as `--dry-run` prints it."""
    made = case.world.made("dry", ["train", CONFIG, "--dry-run"])
    return strict_json(json.loads((made / "ended.json").read_text())["out"])


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


def _legal(rng, kind: tuple) -> tuple[list[str], Any]:
    """(words, value) within a domain."""
    if kind[0] == "int":
        value = rng.choice([kind[1], kind[1] + 1, min(kind[2], kind[1] + rng.randrange(1, 2000)), rng.randrange(kind[1], min(kind[2], 1 << 33))])
        return [rng.choice([str(value), f"+{value}"]) if value else "0"], value
    if kind[0] == "increasing":
        values = sorted(rng.sample(range(2, 4000), rng.randrange(1, 4)))
        return [str(x) for x in values], values
    if kind[0] == "share":
        value = rng.choice([rng.random() or 0.5, 0.5, 0.999999, *([0.0] if kind[1] else []), *([1.0] if kind[2] else [])])
    else:
        value = rng.choice([1.0, 0.1, 1e-9, rng.random() * 100 + 1e-3, 3.0])
    return [repr(value)], value


def _illegal(rng, kind: tuple) -> list[str]:
    """Words outside a domain."""
    odd = ["", "abc", "nan", "inf", "-inf", "1e400", "3,5", "0x10", "None", "[", "-1", "\udc80", "--", "1 2"]
    if kind[0] == "int":
        odd += ["1.5", "1e3", str(kind[1] - 1), "-9" * 30, "true"] + ([str(kind[2] + 1)] if kind[2] != HUGE else [])
    elif kind[0] == "increasing":
        return rng.choice([["0"], ["-5"], ["8", "8"], ["9", "8"], ["a"], ["nan"], [], ["4", "x"], ["1.5"], ["8", ""]])
    elif kind[0] == "share":
        odd += ["-0.1", "1.1", *([] if kind[1] else ["0"]), *([] if kind[2] else ["1"])]
    elif kind[0] == "finite":
        odd.remove("-1")
    elif kind[0] == "positive":
        odd += ["0", "-0.5"]
    return [rng.choice(odd)]


def _option(case: Case, base: dict) -> Verdict:
    rng, now = case.rng, flat(base)
    keys = [key for key in now if domain(key)]
    key = rng.choice(keys)
    kind = rng.choice(["legal", "legal", "illegal", "illegal", "illegal", "huge", "choice", "choice", "bool", "name", "twice", "json", "text"])
    option = rng.choice([f"--{key}", f"--{key.replace('_', '-')}"])
    expected = Expected(names=[key])
    if kind in ("legal", "illegal"):
        words, value = _legal(rng, domain(key)) if kind == "legal" else (_illegal(rng, domain(key)), None)
        if kind == "legal":
            expected.outcomes = [now | {key: value}]
            expected.names = []  # which of two settings that disagree is named is the project's choice
    elif kind == "huge":
        value = rng.choice([2**31, 2**63, 10**18, 10**30])
        words, expected.outcomes = [str(value)], [now | {key: value}]
        if domain(key)[0] == "share":
            expected.outcomes = []
        if domain(key)[0] == "increasing":
            expected.outcomes = [now | {key: [value]}]
        expected.names = []
    elif kind == "choice":
        key = rng.choice(list(CHOICES))
        value = rng.choice([*CHOICES[key], "", "R4", "GRPO", "float16", "None", "\udcff", "x" * 300])
        option, words = f"--{key}", [value]
        legal = value in CHOICES[key]
        expected = Expected([now | {key: value}] if legal else [], [] if legal else [key])
    elif kind == "bool":
        key = rng.choice([k for k, v in now.items() if isinstance(v, bool)])
        value = rng.choice(["True", "False", "true", "yes", "1", "0", "2", "", "None", "Truee"])
        option, words, meant = f"--{key}", [value], {"true": True, "yes": True, "1": True, "false": False, "0": False}
        legal = value.lower() in meant  # what is not spelled True or False may be refused
        expected = Expected([now | {key: meant[value.lower()]}] if legal else [], [] if legal else [key])
    elif kind == "name":
        option = rng.choice([f"--{key}x", f"--{key[:-1]}", f"--{key.upper()}", "--" + key.split(".")[-1] + ".x", f"-{key}", key, f"--{key}\udcaa", "--" + "a" * 300])
        words, expected = ["3"], Expected(names=[])
    elif kind == "twice":
        (one, _), (two, value) = _legal(rng, domain(key)), _legal(rng, domain(key))
        words, expected = [*one, f"--{key}", *two], Expected([now | {key: value}], [])
    elif kind == "json":
        key, words = "data.sources.0.options", [rng.choice([*ODD_TEXTS, '[["a", 1]]', "{}"])[:300]]
        option, expected = f"--{key}", Expected(names=[])  # a file has no such setting
    else:
        key = rng.choice(["data.sources.0.path", "data.tokenizer", "name", "data.sources.0.label", "data.system_prompt"])
        value = rng.choice(["é", "x" * 5000 + ".jsonl", "a b.jsonl", "\u202e.jsonl", "a\nb.jsonl", "a.parquet", "/dev/zero.jsonl"])
        option, words, expected = f"--{key}", [value], Expected([now | {key: value}], [])
    case.tell(f"train --dry-run {option[:80]} {' '.join(words)[:80]!r}")
    joined = kind not in ("twice",) and len(words) == 1 and rng.random() < 0.3
    argv = ["train", CONFIG, "--dry-run", *([f"{option}={words[0]}"] if joined else [option, *words])]
    ended = case.compass(argv)
    return judge(_printed(ended), expected)


def _printed(ended: Ended) -> Ended:
    """With the printed configuration as its outcome; text that is not JSON is an outcome that nothing equals."""
    if ended.status != 0:
        return ended
    try:
        found: Any = flat(strict_json(ended.out))
    except ValueError as error:
        found = f"no JSON: {error}"
    return Ended(ended.status, ended.out, ended.err, ended.timed_out, found, ended.seconds)


def _run_config(case: Case, base: dict) -> Verdict:
    """config.json of an old run directory, then the same command again."""
    rng = case.rng
    case.bring("rows.jsonl", "tokenizer")
    file = case.folder / "run" / "config.json"
    file.parent.mkdir()
    text, names = json.dumps(base, indent=2), ["config.json"]
    kind = rng.choice(["bytes", "encoding", "json", "json", "json", "json", "place"])
    if kind == "bytes":
        data, told = damage_bytes(text.encode(), rng)
    elif kind == "encoding":
        data, told = odd_encoding(text, rng)
    elif kind == "json":
        changed, told, path = damage_json(base, rng, indent=2)
        data, names = changed.encode("utf-8", "surrogatepass"), ["config.json", str(path[-1])]
    else:
        return _odd_place(case, file)
    file.write_bytes(data)
    case.tell(f"run/config.json: {told}; train")
    wanted = case.world.outcome("prompts", ["train", CONFIG], spies.prompts)
    expected = Expected([[wanted, base]] if same_run(data, base) else [], names)
    return judge(_with_config(case.compass(["train", CONFIG], spies.prompts), file), expected)


def _odd_place(case: Case, file) -> Verdict:
    kind = case.rng.choice(["folder", "empty", "link to nothing", "device"])
    case.tell(f"run/config.json is {kind}; train")
    if kind == "folder":
        file.mkdir()
    elif kind == "empty":
        file.write_text("")
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.symlink_to("nothing.json")
    ended = case.compass(["train", CONFIG], spies.prompts, seconds=30)
    base = baseline(case)
    wanted = case.world.outcome("prompts", ["train", CONFIG], spies.prompts)
    # A link to nothing is no configuration: a new run may begin there.
    expected = Expected([[wanted, base]] if kind == "link to nothing" else [], ["config.json"])
    return judge(_with_config(ended, file), expected)


def _with_config(ended: Ended, file) -> Ended:
    """With the prompts and the configuration that the directory has now as its outcome."""
    if ended.status != 0 or ended.outcome is NOT_TAKEN:
        return ended
    return Ended(0, ended.out, ended.err, ended.timed_out, [ended.outcome, strict_json(file.read_bytes())], ended.seconds)


def same_run(data: bytes, base: dict) -> bool:
    """Whether config.json still describes the run `base`: by the letter of JSON, but for settings that may change and defaults left out."""
    try:
        found = strict_json(data)
    except ValueError:
        return False
    if not isinstance(found, dict):
        return False
    a, b = flat(base), flat(found)
    defaults = _defaults()
    for key in {*a, *b}:
        if MAY_CHANGE.match(key) and (key not in b or key in a):
            continue
        old, new = a.get(key, NOT_TAKEN), b.get(key, defaults.get(key, NOT_TAKEN))
        if old != new or isinstance(old, bool) != isinstance(new, bool):
            return False
    return True


def _defaults() -> dict[str, Any]:
    """What a setting is where config.json leaves it out: RunConfig's own defaults, around the smallest model."""
    from compass_jax.config import DataConfig, FileSource, ModelConfig, MoEConfig, RunConfig
    from compass_jax.config_io import config_to_json

    model = ModelConfig("qwen3_moe", 1, 1, 1, 1, 1, 2, 1, moe=MoEConfig(2, 1, 1))
    found = flat(json.loads(config_to_json(RunConfig("", model, data=DataConfig(sources=(FileSource(""),))))))
    required = re.compile(r"name|model\.(family|vocab_size|hidden|layers|heads|kv_heads|head_dim|ffn|moe\.(experts|top_k|ffn))|data\.sources.*\.path|.*kind")
    return {key: value for key, value in found.items() if not required.fullmatch(key)}
