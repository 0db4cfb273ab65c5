"""Faults of the configuration: options on the command line, and config.json of a run directory.

The documented meaning of every setting is in `DOMAINS`, by hand. An option is drawn legal or not:
what is not has to be refused; what is legal may be accepted (then `--dry-run --json` must print
this value and no other change) or refused by words, where two settings disagree.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from . import spies
from .settings import CHOICES, MAY_CHANGE, defaults, domain, flat, illegal_words, legal_words
from .strict import ODD_TEXTS, damage_bytes, damage_json, odd_encoding, strict_json
from .words import NOT_TAKEN, Ended, Expected, Verdict, judge
from .world import CONFIG, Case

SHARE = 22


def run(case: Case) -> Verdict:
    """One fault of an option, or of config.json."""
    base = baseline(case)
    return _option(case, base) if case.rng.random() < 0.6 else _run_config(case, base)


def baseline(case: Case) -> dict:
    """The undisturbed configuration, as `--dry-run --json` prints it."""
    made = case.world.made("dry", ["train", CONFIG, "--dry-run", "--json"])
    return strict_json(json.loads((made / "ended.json").read_text())["out"])


def _option(case: Case, base: dict) -> Verdict:
    rng, now = case.rng, flat(base)
    kinds = ["range"] * 5 + ["huge", "choice", "choice", "bool", "name", "twice", "json", "text"]
    kind = rng.choice(kinds)
    key = rng.choice([key for key in now if domain(key)])
    option, words, expected = _OPTIONS[kind](rng, now, key)
    case.tell(f"train --dry-run {option[:80]} {' '.join(words)[:80]!r}")
    joined = kind != "twice" and len(words) == 1 and rng.random() < 0.3
    written = [f"{option}={words[0]}"] if joined else [option, *words]
    return judge(
        _printed(case.compass(["train", CONFIG, "--dry-run", "--json", *written])), expected
    )


Option = tuple[str, list[str], Expected]


def _spelled(rng: random.Random, key: str) -> str:
    return rng.choice([f"--{key}", f"--{key.replace('_', '-')}"])


def _in_range(rng: random.Random, now: dict, key: str) -> Option:
    """A value within its documented range, or outside it."""
    if rng.random() < 0.6:
        return _spelled(rng, key), illegal_words(rng, domain(key)), Expected(names=[key])
    words, value = legal_words(rng, domain(key))
    # Which of two settings that disagree is named is the project's choice.
    return _spelled(rng, key), words, Expected([now | {key: value}])


def _huge(rng: random.Random, now: dict, key: str) -> Option:
    value, kind = rng.choice([2**31, 2**63, 10**18, 10**30]), domain(key)[0]
    found = {"share": [], "increasing": [now | {key: [value]}]}.get(kind, [now | {key: value}])
    return _spelled(rng, key), [str(value)], Expected(found)


def _choice(rng: random.Random, now: dict, key: str) -> Option:
    key = rng.choice(list(CHOICES))
    odd = ["", "R4", "GRPO", "float16", "None", "\udcff", "x" * 300]
    value = rng.choice([*sorted(CHOICES[key]), *odd])
    legal = value in CHOICES[key]
    expected = Expected([now | {key: value}]) if legal else Expected(names=[key])
    return f"--{key}", [value], expected


def _bool(rng: random.Random, now: dict, key: str) -> Option:
    key = rng.choice([k for k, v in now.items() if isinstance(v, bool)])
    value = rng.choice(["True", "False", "true", "yes", "1", "0", "2", "", "None", "Truee"])
    meant = {"true": True, "yes": True, "1": True, "false": False, "0": False}.get(value.lower())
    # What is not spelled True or False may be refused.
    expected = Expected(names=[key]) if meant is None else Expected([now | {key: meant}])
    return f"--{key}", [value], expected


def _name(rng: random.Random, now: dict, key: str) -> Option:
    odd = [f"--{key}x", f"--{key[:-1]}", f"--{key.upper()}", f"-{key}", key, f"--{key}\udcaa"]
    return rng.choice([*odd, "--" + key.split(".")[-1] + ".x", "--" + "a" * 300]), ["3"], Expected()


def _twice(rng: random.Random, now: dict, key: str) -> Option:
    one = legal_words(rng, domain(key))[0]
    two, value = legal_words(rng, domain(key))
    return _spelled(rng, key), [*one, f"--{key}", *two], Expected([now | {key: value}])


def _json(rng: random.Random, now: dict, key: str) -> Option:
    """A setting that a source of files does not have."""
    words = [rng.choice([*ODD_TEXTS, '[["a", 1]]', "{}"])[:300]]
    return "--data.sources.0.options", words, Expected()


def _text(rng: random.Random, now: dict, key: str) -> Option:
    texts = ["data.sources.0.path", "data.sources.0.label", "data.tokenizer", "data.system_prompt"]
    key = rng.choice([*texts, "name"])
    values = ["é", "x" * 5000 + ".jsonl", "a b.jsonl", "\u202e.jsonl", "a\nb.jsonl", "a.parquet"]
    value = rng.choice([*values, "/dev/zero.jsonl"])
    return f"--{key}", [value], Expected([now | {key: value}])


_OPTIONS: dict[str, Callable[[random.Random, dict, str], Option]] = {
    "range": _in_range,
    "huge": _huge,
    "choice": _choice,
    "bool": _bool,
    "name": _name,
    "twice": _twice,
    "json": _json,
    "text": _text,
}


def _printed(ended: Ended) -> Ended:
    """With the printed configuration as its outcome; text that is not JSON is an outcome that
    nothing equals.
    """
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
    # a directory in which nothing was trained may be taken by another configuration
    (file.parent / "metrics.jsonl").write_text('{"stage": "rl", "step": 1, "metrics": {}}\n')
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
    return Ended(
        0,
        ended.out,
        ended.err,
        ended.timed_out,
        [ended.outcome, strict_json(file.read_bytes())],
        ended.seconds,
    )


def same_run(data: bytes, base: dict) -> bool:
    """Whether config.json still describes the run `base`: by the letter of JSON, but for settings
    that may change and defaults left out.
    """
    try:
        found = strict_json(data)
    except ValueError:
        return False
    if not isinstance(found, dict):
        return False
    a, b = flat(base), flat(found)
    assumed = defaults()
    for key in {*a, *b}:
        if MAY_CHANGE.match(key) and (key not in b or key in a):
            continue
        old, new = a.get(key, NOT_TAKEN), b.get(key, assumed.get(key, NOT_TAKEN))
        if old != new or isinstance(old, bool) != isinstance(new, bool):
            return False
    return True
