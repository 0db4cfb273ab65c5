"""The process of a program under test: loads it, calls its functions and returns the results.

`python -I program_child.py PACKAGES` reads requests from stdin, one JSON value per line, and
answers each with one line. `python -I program_child.py PACKAGES FILE` runs a program as a script.
PACKAGES is a JSON object that maps importable packages to their paths. The process has no tests, no
expected values and no access to the process of the tests. Its answers are untrusted.

Values are encoded as JSON; objects such as {"tuple": [...]} denote types that JSON lacks.
"""

import json
import os
import sys
from itertools import islice

MOST_ITEMS = 100_000  # maximum number of items read from a returned iterator
MOST_NESTED = 100
MOST_BITS = 10_000  # integers above this size are sent in hexadecimal (decimal is quadratic)
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}


class Packages:
    """An import finder for packages in folders that cannot be listed. `places` maps a name to a
    file or to a package folder.
    """

    def __init__(self, places):
        self.places = places

    def find_spec(self, name, path=None, target=None):
        """Returns the spec of a package, or None for other names."""
        if path is not None or name not in self.places:
            return None
        from importlib import machinery, util  # imported late, since most programs need no package

        place = self.places[name]
        if not os.path.isdir(place):
            return util.spec_from_file_location(name, place)
        start = os.path.join(place, "__init__.py")
        if os.path.isfile(start):
            return util.spec_from_file_location(name, start, submodule_search_locations=[place])
        spec = machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [place]
        return spec


def encode(value, nested=0):
    """Returns a value in its JSON encoding. Raises TypeError for a value that is not plain data,
    and ValueError for one that is nested too deeply.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > MOST_BITS:
        return {"int": hex(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if nested > MOST_NESTED:
        raise ValueError("the value is nested too deeply")
    for name, kind in (*_SEQUENCES.items(), ("list", list)):
        if isinstance(value, kind):
            items = [encode(item, nested + 1) for item in kind.__iter__(value)]
            return items if name == "list" else {name: items}
    if isinstance(value, dict):
        pairs = [[encode(k, nested + 1), encode(v, nested + 1)] for k, v in dict.items(value)]
        return {"dict": pairs}
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "__next__") or isinstance(value, range):
        return [encode(item, nested + 1) for item in islice(value, MOST_ITEMS)]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), nested + 1)
    raise TypeError(f"a {type(value).__name__} cannot be handed over")


def decode(value):
    """Returns the value that `encode` encoded, or raises ValueError or TypeError."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "dict":
        return {decode(key): decode(item) for key, item in content}
    if name == "int":
        return int(content, 16)
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "complex":
        return complex(*content)
    if name not in _SEQUENCES:
        raise ValueError(f"unknown form {name!r:.40}")
    return _SEQUENCES[name](decode(item) for item in content)


def _load(text, names):
    exec(compile(text, "program.py", "exec"), names)
    return {"names": [name for name, value in names.items() if callable(value)]}


def _call(names, name, args, kwargs, in_place):
    args, kwargs = decode(args), decode(kwargs)
    value = names[name](*args, **kwargs)
    if hasattr(type(value), "__next__"):  # exceptions of a generator belong to the function
        value = list(islice(value, MOST_ITEMS))
    try:
        after = [*args, *kwargs.values()] if in_place else []
        return {"value": encode(value), "after": encode(after)}
    except Exception as error:
        return {"unsendable": _text(error)}


def _text(error):
    try:
        return str(error)[:500]
    except BaseException:
        return ""


def _error_answer(error):
    answer = {"raised": [kind.__name__ for kind in type(error).__mro__], "text": _text(error)}
    try:
        return {**answer, "args": encode(list(error.args))}
    except Exception:
        return answer


def _new_names():
    return {"__name__": "program", "__builtins__": __builtins__}


def serve():
    """Answers requests until the input ends. The program's own output is discarded."""
    sys.setrecursionlimit(3000)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    names = _new_names()
    for line in requests:
        request = json.loads(line)
        try:
            if "load" in request:
                names = _new_names()
                answer = _load(request["load"], names)
            else:
                answer = _call(names, *request["call"])
            line = json.dumps(answer)
        except BaseException as error:  # the program may even call exit()
            line = json.dumps(_error_answer(error))
        left = line.encode() + b"\n"
        while left:
            left = left[os.write(answers, left) :]


def run(file):
    """Runs a program as a script."""
    sys.argv = [file]
    main = type(sys)("__main__")
    main.__file__ = file
    sys.modules["__main__"] = main
    with open(file, encoding="utf-8") as source:
        code = compile(source.read(), file, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    packages, *files = sys.argv[1:]
    site_folders = ("site-packages", "dist-packages")
    sys.path[:] = [path for path in sys.path if not path.endswith(site_folders)]
    sys.meta_path.append(Packages(json.loads(packages)))
    sys.argv = [""]
    run(*files) if files else serve()
