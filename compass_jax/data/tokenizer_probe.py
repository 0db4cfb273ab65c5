"""A tokenizer.json, tried in a process of its own before anybody relies on it: some take for ever
to load, some drop all text.

    python -m compass_jax.data.tokenizer_probe < tokenizer.json

It prints what is wrong as JSON text, null where nothing is.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from functools import lru_cache
from typing import Any

from compass_jax.processes.start import import_path, module_command
from compass_jax.untrusted import UntrustedError, parse_json

MODULE = "compass_jax.data.tokenizer_probe"
CPU_S, WALL_S = 60, 300
MEMORY = 6 * 2**30
DIGITS, LETTERS = ("0123456789", "17", "42"), ("the answer is", "abcdefghijklmnopqrstuvwxyz")
PLAIN = "".join(map(chr, range(ord("!"), ord("~") + 1)))  # characters that no tokenizer may lose
# what regexes backtrack over
LONG = tuple(
    4000 * part + end for part in ("a", "0", " ", "\n", "!", "ab ") for end in ("", "\n", "é")
)


@lru_cache(maxsize=4)
def problem_of(text: str) -> str | None:
    """What is wrong with a tokenizer.json; None where nothing was found."""
    passed = {
        name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ
    }
    passed |= {"PYTHONPATH": import_path(), "RUST_BACKTRACE": "0"}
    passed |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    command = module_command(MODULE)
    try:
        done = subprocess.run(
            command,
            input=text.encode(),
            capture_output=True,
            env=passed,
            timeout=WALL_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return f"it takes longer than {WALL_S} s to load and to encode a few texts"
    try:
        return json.loads(done.stdout)
    except ValueError:
        return (
            f"loading it and encoding a few texts takes more than {CPU_S} s or {MEMORY // 2**30}"
            f" GiB, or fails (status {done.returncode})"
        )


def problem_in(text: str) -> str | None:
    """`problem_of`, in this process."""
    from tokenizers import Tokenizer as Backend

    try:
        raw = parse_json(text, "its text")
        backend = Backend.from_str(text)
    except UntrustedError as error:
        return str(error)
    except BaseException as error:  # the library raises bare Exception, and panics of another kind
        return f"it cannot be read: {error}"
    if dropout := getattr(backend.model, "dropout", None):
        return (
            f"its dropout of {dropout:g} would encode the same text in many ways; set model.dropout"
            " to null"
        )
    backend.no_truncation()
    backend.no_padding()
    return _ids(raw, backend) or _texts(backend)


def _ids(raw: Any, backend: Any) -> str | None:
    by_id: dict[int, str] = {}
    for token, index in backend.get_vocab(with_added_tokens=True).items():
        if by_id.setdefault(index, token) != token:
            return f"the tokens {by_id[index]!r:.60} and {token!r:.60} have the same id {index}"
    for token in raw.get("added_tokens") or ():
        found = backend.token_to_id(token["content"])
        if found != token["id"]:
            return (
                f"added_tokens gives {token['content']!r:.60} the id {token['id']}, which it cannot"
                f" have (it gets {found})"
            )
    return None


def _texts(backend: Any) -> str | None:
    def there_and_back(text: str) -> str:
        return backend.decode(
            backend.encode(text, add_special_tokens=False).ids, skip_special_tokens=True
        )

    try:
        for text in (*DIGITS, *LETTERS):
            if not there_and_back(text).strip():
                return (
                    f"{text!r} is encoded to nothing: what the normaliser or the vocabulary leaves"
                    " of a text is empty"
                )
        for sign in PLAIN:
            if not backend.decode(
                backend.encode(sign, add_special_tokens=False).ids, skip_special_tokens=False
            ).strip():
                return (
                    f"{sign!r} is encoded to nothing, and no token stands for what is unknown:"
                    " texts would lose it"
                )
        for text in LETTERS:  # another case or other blanks are a tokenizer's right
            if " ".join((found := there_and_back(text)).split()).casefold() != text:
                return f"{text!r} comes back as {found!r:.80}: answers would be read as other texts"
        if len({there_and_back(text) for text in DIGITS}) < len(DIGITS):
            return (
                f"{DIGITS[1]!r} and {DIGITS[2]!r} are encoded alike: numbers cannot be told apart"
            )
        for text in LONG:
            there_and_back(text)
    except BaseException as error:  # a panic, of a regular expression that backtracks for ever
        return f"it cannot encode a plain text: {error}"
    return None


def main() -> int:
    """The process. Returns its exit status."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print(json.dumps(problem_in(sys.stdin.buffer.read().decode())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
