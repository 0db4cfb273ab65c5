"""The process of a program under test: loads it, applies operations to its objects and returns the
results.

`python -I program_child.py PACKAGES` reads requests from stdin, one JSON value per line, and
answers each with one line. `python -I program_child.py PACKAGES FILE` runs a program as a script.
PACKAGES is a JSON object that maps importable packages to their paths. The process has no tests, no
expected values and no access to the process of the tests. Its answers are untrusted.

Values of Python's types, and arrays, are sent by value. Objects of classes that the row's setup
defines are sent with their attributes. All other objects stay here, and are sent as numbers.
"""

import binascii
import builtins
import importlib
import json
import operator
import os
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from enum import Enum

MOST_NESTED = 100
MOST_BITS = 10_000  # integers above this size are sent in hexadecimal (decimal is quadratic)
_SEQUENCES = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "bytearray": bytearray,
}
_MAPPINGS: dict[str, Callable] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "defaultdict": lambda pairs: defaultdict(None, pairs),
    "keys": lambda pairs: dict(pairs).keys(),
}
# types that are sent as text: the functions that write and read it
_TEXTS = {
    "datetime.date": ("isoformat", "fromisoformat"),
    "datetime.datetime": ("isoformat", "fromisoformat"),
    "datetime.time": ("isoformat", "fromisoformat"),
    "decimal.Decimal": ("__str__", ""),
    "fractions.Fraction": ("__str__", ""),
    "uuid.UUID": ("__str__", ""),
    "pathlib.PosixPath": ("__str__", ""),
    "pathlib.PurePosixPath": ("__str__", ""),
}
_DTYPE = re.compile(r"[<>|=]?(?:[?]|[biufcSU]\d{1,9}|[mM]8(?:\[\d{0,9}\w{1,9}\])?)")
PROGRAM = "program"  # the name of the program's module


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


class Codec:
    """The encoding of one message, used by both processes.

    Args:
        classes: the classes, by name, whose objects are sent with their attributes.
        keep: returns the encoding of any other object. Raises TypeError for one that cannot be
            sent.
        find: returns the object that `keep` encoded.
    """

    def __init__(self, classes, keep, find):
        self.classes, self.keep, self.find = classes, keep, find
        self.objects = []  # those that are sent with their attributes
        self._numbers = {}

    def encode(self, value, nested=0):
        """Returns the JSON encoding of a value. Raises TypeError, and ValueError for a value that
        is nested too deeply.
        """
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value.bit_length() > MOST_BITS
        ):
            return {"int": [hex(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            # NumPy's float64 is a float
            return value if type(value).__module__ != "numpy" else self._array(value, nested)
        if nested > MOST_NESTED:
            raise ValueError("the value is nested too deeply")
        fields = getattr(value, "_fields", None) if isinstance(value, tuple) else None
        if isinstance(fields, tuple):
            items = [self.encode(item, nested + 1) for item in tuple.__iter__(value)]
            return {"named": [type(value).__name__, list(fields), items]}
        for name, kind in (*_SEQUENCES.items(), ("list", list)):
            if isinstance(value, kind):
                items = [self.encode(item, nested + 1) for item in kind.__iter__(value)]
                return items if name == "list" else {name: items}
        if isinstance(value, dict | type({}.keys())):
            return self._mapping(value, nested)
        return self._encode_object(value, nested)

    def _mapping(self, value, nested):
        if not isinstance(value, dict):
            return {"keys": [[self.encode(key, nested + 1), None] for key in value]}
        name = type(value).__name__ if type(value).__module__ == "collections" else "dict"
        items = dict.items(value)
        pairs = [[self.encode(key, nested + 1), self.encode(x, nested + 1)] for key, x in items]
        return {name if name in _MAPPINGS else "dict": pairs}

    def _encode_object(self, value, nested):
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, bytes):
            return {"bytes": [bytes.hex(value)]}
        if isinstance(value, complex) and kind.__module__ != "numpy":
            return {"complex": [value.real, value.imag]}
        if kind is range:
            return {"range": [value.start, value.stop, value.step]}
        if name == "datetime.timedelta":
            return {"delta": [value.days, value.seconds, value.microseconds]}
        if name in _TEXTS:
            return {"text": [name, getattr(value, _TEXTS[name][0])()]}
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return self._array(value, nested)
        builtin = getattr(value, "__name__", "") if isinstance(value, type) else ""
        if builtin and vars(builtins).get(builtin) is value:
            return {"type": [builtin]}
        if self.classes.get(kind.__name__) is kind:
            if isinstance(value, Enum):
                return {"member": [kind.__name__, value.name]}
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.objects)
                self.objects.append(value)
            return {"object": self._numbers[id(value)]}
        return self.keep(value)

    def _array(self, value, nested):
        dtype, shape = value.dtype, list(value.shape)
        name = "array" if type(value).__name__ == "ndarray" else "scalar"
        if dtype.hasobject:
            items = value.reshape(-1).tolist() if name == "array" else [value]
            return {name: ["O", shape, [self.encode(item, nested + 1) for item in items]]}
        if dtype.kind == "V":  # records
            return self.keep(value)
        return {name: [dtype.str, shape, binascii.b2a_base64(value.tobytes()).decode()]}

    def attributes(self):
        """Returns the class and the attributes of each object in the message, encoded."""
        states = []
        for value in self.objects:  # grows: attributes may hold further objects
            state = dict(getattr(value, "__dict__", {}))
            for kind in type(value).__mro__:
                for name in _slots(kind):
                    if hasattr(value, name):
                        state[name] = getattr(value, name)
            pairs = [[name, self.encode(item)] for name, item in state.items()]
            states.append([type(value).__name__, pairs])
        return states

    def read_attributes(self, states):
        """Sets the attributes of the message's objects, and creates those that are new."""
        for name, _ in states[len(self.objects) :]:
            kind = self.classes[name]
            value = object.__new__(kind)
            self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        for value, (_, pairs) in zip(self.objects, states):
            getattr(value, "__dict__", {}).clear()
            for name, item in pairs:
                if not name.isidentifier() or name.startswith("__"):
                    raise ValueError(f"no attribute: {name!r:.40}")
                object.__setattr__(value, name, self.decode(item))

    def decode(self, value):
        """Returns an encoded value. Raises an exception for a malformed one."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((name, content),) = value.items()
        if name in _MAPPINGS:
            return _MAPPINGS[name]([(self.decode(key), self.decode(x)) for key, x in content])
        if name in _SEQUENCES:
            return _SEQUENCES[name]([self.decode(item) for item in content])
        if name in ("array", "scalar"):
            return self._decode_array(name, *content)
        if name == "object":
            return self.objects[content]
        if name == "member":
            return self.classes[content[0]][content[1]]
        if name == "named":
            kind, fields, items = content
            return namedtuple(kind, fields)(*[self.decode(item) for item in items])
        if name == "iterator":
            return iter([self.decode(item) for item in content])
        return _READERS[name](*content) if name in _READERS else self.find(name, content)

    def _decode_array(self, name, dtype, shape, content):
        import numpy

        if dtype == "O":
            items = [self.decode(item) for item in content]
            array = numpy.empty(len(items), object)
            for number, item in enumerate(items):  # a slice would unpack items that are lists
                array[number] = item
        elif _DTYPE.fullmatch(dtype):
            array = numpy.frombuffer(binascii.a2b_base64(content), numpy.dtype(dtype)).copy()
        else:
            raise ValueError(f"unknown type of numbers {dtype!r:.40}")
        return array.reshape(shape) if name == "array" else array[0]


def _slots(kind):
    names = vars(kind).get("__slots__", ())
    names = (names,) if isinstance(names, str) else names
    return [name for name in names if not name.startswith("__")]


def _read_type(name):
    if not isinstance(kind := getattr(builtins, name), type):
        raise ValueError(f"no type: {name!r:.40}")
    return kind


def _read_text(name, text):
    module, _, kind = name.partition(".")
    kind = getattr(importlib.import_module(module), kind)
    reader = _TEXTS[name][1]
    return (getattr(kind, reader) if reader else kind)(text)


def _read_delta(days, seconds, microseconds):
    return importlib.import_module("datetime").timedelta(days, seconds, microseconds)


# forms whose content is the arguments of a function
_READERS: dict[str, Callable] = {
    "bytes": bytes.fromhex,
    "int": lambda text: int(text, 16),
    "complex": complex,
    "range": range,
    "text": _read_text,
    "delta": _read_delta,
    "type": _read_type,
}


class Server:
    """The program's names, and its objects that the tests' process knows by their numbers."""

    def __init__(self):
        sys.modules[PROGRAM] = module = type(sys)(PROGRAM)
        self.names = vars(module)
        self.classes: list[
            str
        ] = []  # names of the classes whose objects are sent with their attributes
        self.kept = []
        self.numbers = {}

    def keep(self, value):
        """Returns the encoding of an object that stays in this process."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        kind = value if isinstance(value, type) else type(value)
        names = [base.__name__ for base in kind.__mro__]
        content = [self.numbers[id(value)], _group(value), f"{kind.__module__}.{kind.__name__}"]
        return {"kept": [*content, names]}

    def find(self, name, content):
        """Returns an object of this process, or a builtin function."""
        return self.kept[content] if name == "kept" else getattr(builtins, content)

    def answer(self, request):
        """Returns the answer to a request."""
        if "load" in request:
            self.classes = request["classes"]
            exec(compile(request["load"], "program.py", "exec"), self.names)
            return {"names": [name for name in self.names if not name.startswith("__")]}
        classes = {name: self.names[name] for name in self.classes if name in self.names}
        codec = Codec(classes, self.keep, self.find)
        if "read" in request:
            values = {name: self.names[name] for name in request["read"] if name in self.names}
            return {"value": codec.encode(values), "objects": codec.attributes()}
        codec.read_attributes(request["objects"])
        args, kwargs = codec.decode(request["args"]), codec.decode(request["kwargs"])
        value = apply(request["do"], args, kwargs)
        after = [*args, *kwargs.values()] if request["in_place"] else []
        is_programs = type(value).__module__ == PROGRAM and not hasattr(type(value), "_fields")
        try:
            encoded = self.keep(value) if request["new"] and is_programs else codec.encode(value)
            return {"value": encoded, "after": codec.encode(after), "objects": codec.attributes()}
        except Exception as error:
            return {"unsendable": _text(error)}


def _group(value):
    """Returns how the tests' process represents an object."""
    if isinstance(value, type):
        return "error" if issubclass(value, BaseException) else "class"
    name = type(value).__name__
    return name if name in ("generator", "coroutine") else "object"


def apply(operation, args, kwargs):
    """Returns the result of an operation. For "next" it is a list, empty at the end."""
    if operation == "call":
        return args[0](*args[1:], **kwargs)
    if operation == "next":
        try:
            return [args[0].send(args[1]) if len(args) > 1 else next(args[0])]
        except StopIteration:
            return []
    if operation == "await":
        import asyncio  # imported late, since most programs need it not

        return asyncio.run(*args)
    place = builtins if hasattr(builtins, operation) else operator
    return getattr(place, operation)(*args)


def _text(error):
    try:
        return str(error)[:500]
    except BaseException:
        return ""


def _error_answer(error):
    answer = {"raised": [kind.__name__ for kind in type(error).__mro__], "text": _text(error)}
    codec = Codec({}, _refuse, _refuse)
    try:
        state = {name: x for name, x in vars(error).items() if not name.startswith("_")}
        return {**answer, "args": codec.encode([list(error.args), state])}
    except Exception:
        return answer


def _refuse(value):
    raise TypeError(f"a {type(value).__name__} cannot be handed over")


def serve():
    """Answers requests until the input ends. The program's own output is discarded."""
    sys.setrecursionlimit(3000)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    server = Server()
    for line in requests:
        try:
            line = json.dumps(server.answer(json.loads(line)))
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
