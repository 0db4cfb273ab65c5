"""Runs in the process of a program that is judged: loads it, calls its functions, says what came.

`python -I program_child.py` reads one line of JSON for each request from its input and answers each
with one line. It is started without anything that the program must not know: no test, no expected
value, nothing of the process that judges. What it says is a claim of the program's, no verdict.

Values travel as JSON: {"tuple": [...]} and so on stand for what JSON has no form of.
"""

import json
import os
import sys
from itertools import islice

MOST_ITEMS = 100_000  # of an iterator that a function returns
MOST_NESTED = 100
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value, nested=0):
    """A value as JSON can carry it. Raises TypeError for what is no plain data."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if nested > MOST_NESTED:
        raise TypeError("the value is nested too deeply")
    for name, kind in (*_SEQUENCES.items(), ("list", list)):
        if isinstance(value, kind):
            items = [encode(item, nested + 1) for item in value]
            return items if name == "list" else {name: items}
    if isinstance(value, dict):
        pairs = [[encode(k, nested + 1), encode(v, nested + 1)] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "__next__") or isinstance(value, range):
        return [encode(item, nested + 1) for item in islice(value, MOST_ITEMS)]
    raise TypeError(f"a {type(value).__name__} cannot be handed over: return plain data")


def decode(value):
    """The value of `encode`. Raises ValueError or TypeError for anything else."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "dict":
        return {decode(key): decode(item) for key, item in content}
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "complex":
        return complex(*content)
    if name not in _SEQUENCES:
        raise ValueError(f"unknown form {name!r:.40}")
    return _SEQUENCES[name](decode(item) for item in content)


def _loaded(text, names):
    exec(compile(text, "program.py", "exec"), names)
    return {"names": [name for name, value in names.items() if callable(value)]}


def _called(names, name, args, kwargs):
    args, kwargs = decode(args), decode(kwargs)
    value = encode(names[name](*args, **kwargs))
    return {"value": value, "args": encode(args)}


def main():
    """Answers requests until the input ends; the program's own output goes nowhere."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    names = {"__name__": "program", "__builtins__": __builtins__}
    for line in requests:
        request = json.loads(line)
        try:
            if "load" in request:
                said = _loaded(request["load"], names)
            else:
                said = _called(names, *request["call"])
            line = json.dumps(said)
        except BaseException as error:  # a program may even call exit()
            text = str(error)[:500] if isinstance(error, Exception) else ""
            line = json.dumps({"raised": type(error).__name__, "text": text})
        left = line.encode() + b"\n"
        while left:
            left = left[os.write(answers, left) :]


if __name__ == "__main__":
    sys.setrecursionlimit(3000)
    main()
