"""The objects of a program, as its tests see them.

Plain data cross by value (program_child.py). Any other object stays in the program's process, and
the tests hold a ProgramObject, whose calls, attributes, items and iteration are requests. Only
plain values are compared: a program cannot claim that its object equals the expected value, nor
that their difference is 0.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.errors import CompassError
from compass_jax.rewards.verifiers.program_child import Codec

MOST_ITEMS = 100_000  # maximum number of items of a test's iterator that a program gets
IN_PLACE = "_compass_in_place"  # attribute of a program's function (`in_place_variant`)
_VIEWS = (type({1: 1}.values()), type({1: 1}.items()))
# methods of plain values that answer yes or no: a result that should be such a value, and is an
# object of the program, would answer yes to anything
_PREDICATES = frozenset(
    name
    for kind in (str, bytes, set, float)
    for name in dir(kind)
    if name.startswith("is") or name.endswith("swith")
) | {"all", "any", "equals"}
_UNARY = (
    "len str repr bool int float abs reversed round index neg pos invert getitem setitem delitem"
)
_BINARY = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor"
# modules of values that are sent, and of objects that tests compare with
_COMPARED = (
    *("builtins", "collections", "datetime", "decimal", "fractions", "numpy", "pathlib", "uuid"),
    *("unittest", "_pytest", "pytest", "tests"),
)


class RowError(CompassError, ValueError):
    """A row that no program can pass or fail, because its setup or a test cannot run."""


class ProgramFailed(CompassError):
    """The program ended, hung, or wrote malformed output; the message has the details."""


class StartsProcesses(CompassError):
    """The program was killed when it started a process, which its limits forbid."""


class Reference(NamedTuple):
    """The place of a program's object."""

    link: Link
    number: int
    kind: str  # the module and name of its class
    # whether the test created it from a class that it names; its operators are then methods
    is_new: bool


class ProgramObject:
    """An object in the program's process."""

    __slots__ = ("_compass",)
    _compass: Reference

    def __init__(self, reference: Reference):
        object.__setattr__(self, "_compass", reference)

    def __call__(self, *args: object, **kwargs: object) -> Json:
        """Calls the object."""
        return self._compass.link.call(self, args, kwargs, False)

    @property
    def _compass_in_place(self) -> Callable[..., Json]:
        """The object as a function that changes its arguments in the test, too."""
        link = self._compass.link
        return lambda *args, **kwargs: link.call(self, args, kwargs, True)

    def __getattr__(self, name: str) -> Json:
        """Returns an attribute."""
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        if name in _PREDICATES and not self._compass.is_new:
            raise AttributeError(f"{name}: an object of the program is not asked this")
        return self._compass.link.request("getattr", (self, name))

    def __setattr__(self, name: str, value: object) -> None:
        """Sets an attribute."""
        self._compass.link.request("setattr", (self, name, value))

    def __delattr__(self, name: str) -> None:
        """Deletes an attribute."""
        self._compass.link.request("delattr", (self, name))

    def __iter__(self) -> Iterator[Json]:
        """Yields the items."""
        yield from self._compass.link.items(self._compass.link.request("iter", (self,)))

    def __next__(self) -> Json:
        """Returns the next item."""
        for item in self._compass.link.request("next", (self,)):
            return item
        raise StopIteration

    def __contains__(self, value: object) -> bool:
        """Returns whether an item equals a value."""
        return any(item is value or item == value for item in self)

    def __enter__(self) -> Json:
        """Enters the object as a context."""
        return self._compass.link.request("getattr", (self, "__enter__"))()

    def __exit__(self, *_: object) -> None:
        """Leaves the context. The program sees no exception of the test."""
        self._compass.link.request("getattr", (self, "__exit__"))(None, None, None)

    def __hash__(self) -> int:
        """Returns a hash by identity."""
        return id(self)

    def __eq__(self, value: object) -> Any:
        """Returns whether a test's own object is this; other objects of a program equal nothing."""
        reference = self._compass
        if isinstance(value, ProgramObject):
            if reference.is_new and value is self:
                return True
            if reference.is_new or value._compass.is_new:
                reference.link.refuse_comparison(reference.kind)
            return False
        kind = type(value)
        is_library = kind.__module__.partition(".")[0] not in _COMPARED
        if is_library and reference.kind == f"{kind.__module__}.{kind.__name__}":
            reference.link.refuse_comparison(reference.kind)
        if reference.is_new and value is not None and kind.__module__ == "builtins":
            reference.link.refuse_comparison(reference.kind)
        return NotImplemented

    def __ne__(self, value: object) -> Any:
        """Returns the opposite of `==`."""
        equal = self.__eq__(value)
        return equal if equal is NotImplemented else not equal

    def _order(self, value: object) -> Any:
        """Returns that the object has no order known to the tests."""
        if self._compass.is_new or (isinstance(value, ProgramObject) and value._compass.is_new):
            self._compass.link.refuse_comparison(self._compass.kind)
        return NotImplemented

    __lt__ = __le__ = __gt__ = __ge__ = _order


def _add_operators() -> None:
    """Adds the operators that are requests to ProgramObject."""

    def unary(operation: str) -> Callable[..., Json]:
        return lambda self, *args: self._compass.link.request(operation, (self, *args))

    def binary(operation: str, reflected: bool) -> Callable[..., Json]:
        def apply(self: ProgramObject, value: object) -> Json:
            if not self._compass.is_new and not isinstance(value, ProgramObject):
                return NotImplemented
            pair = (value, self) if reflected else (self, value)
            return self._compass.link.request(operation, pair)

        return apply

    for name in _UNARY.split():
        setattr(ProgramObject, f"__{name}__", unary(name))
    for name in _BINARY.split():
        operation = f"{name}_" if name in ("and", "or") else name
        setattr(ProgramObject, f"__{name}__", binary(operation, reflected=False))
        setattr(ProgramObject, f"__r{name}__", binary(operation, reflected=True))


_add_operators()


class ProgramClass(ProgramObject):
    """A class of the program."""

    __slots__ = ()

    def __instancecheck__(self, value: object) -> bool:
        """Returns whether an object of the program is one of this class."""
        known = isinstance(value, ProgramObject)
        return known and bool(self._compass.link.request("isinstance", (value, self)))

    def __subclasscheck__(self, value: object) -> bool:
        """Returns whether a class of the program is derived from this one."""
        known = isinstance(value, ProgramObject)
        return known and bool(self._compass.link.request("issubclass", (value, self)))


class Link:
    """The tests' side of the pipe to a program. `ask` sends a request and returns the answer.

    With `in_place`, all calls return the changes to their arguments; else only those of
    `in_place_variant`.
    """

    def __init__(self, ask: Callable[[JsonObject], Any], in_place: bool = False):
        self._ask, self._in_place = ask, in_place
        self._objects: dict[tuple[int, bool], Any] = {}
        self._numbers: dict[int, int] = {}  # id of each of these objects -> its number
        self._errors: dict[str, type[BaseException]] = {}  # the program's classes, by name
        self._named: set[int] = set()  # numbers of the classes that the test names
        self.failure: ProgramFailed | StartsProcesses | None = None  # it can answer no more
        self.begin({})

    def begin(self, names: Mapping[str, Any]) -> None:
        """Begins a test that sees the row's `names`."""
        self._names = names
        self.calls = 0  # number of requests
        self.failed = False  # whether a request had no transferable result
        self.raised: list[BaseException] = []  # the program's exceptions
        self.fault: RowError | None = None  # kept here because a test may catch it

    def load(self, text: str, classes: Sequence[str]) -> list[str]:
        """Loads a program and returns the names that it claims to define. `classes` are those of
        the setup. Raises ProgramFailed if the program raises.
        """
        answer = self._answer({"load": text, "classes": [*classes]})
        if "raised" in answer or not isinstance(names := answer.get("names"), list):
            raise ProgramFailed("it could not be loaded")
        return [name for name in names if isinstance(name, str)]

    def read(self, names: Sequence[str]) -> JsonObject:
        """Returns the values of the program's names. Raises ProgramFailed."""
        if not names:
            return {}
        answer = self._answer({"read": [*names]})
        values = self._guarded(lambda: self._decode(answer, self._codec()))
        if not isinstance(values, dict):
            raise self._fail(ProgramFailed("it wrote a malformed answer"))
        for name, value in values.items():
            if isinstance(value, ProgramClass) and str(name).lstrip("_")[:1].isupper():
                self._named.add(value._compass.number)
            elif not isinstance(value, ProgramObject):
                self.calls += 1  # a value of the program, which no test has to call
        return {name: values[name] for name in names if name in values}

    def call(
        self, function: ProgramObject, args: Sequence[Json], kwargs: JsonMapping, in_place: bool
    ) -> Json:
        """Returns the result of a call."""
        return self.request("call", (function, *args), kwargs, in_place or self._in_place)

    def items(self, iterator: object) -> Iterator[Json]:
        """Yields the items of a program's iterator, which may be a generator."""
        sent = None
        while items := self.request("next", (iterator,) if sent is None else (iterator, sent)):
            sent = yield items[0]

    def refuse_comparison(self, kind: str) -> None:
        """Raises RowError: the program itself would decide a comparison."""
        self.fault = RowError(
            f"a test compares an object of {kind}, which stays in the program's process, so that"
            " the program would decide its own test; compare plain values, such as its attributes"
        )
        raise self.fault

    def request(
        self,
        operation: str,
        args: Sequence[Json],
        kwargs: JsonMapping | None = None,
        in_place: bool = False,
    ) -> Json:
        """Returns the result of an operation on the program's objects. Raises the exception that it
        raised, ProgramFailed and StartsProcesses.
        """
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        codec, kwargs = self._codec(), kwargs or {}
        callee = args[0]
        is_new = isinstance(callee, ProgramClass) and callee._compass.number in self._named
        message = self._message(codec, [*args], {**kwargs})
        message |= {"do": operation, "in_place": in_place, "new": is_new and operation == "call"}
        answer = self._answer(message)
        result = self._guarded(lambda: self._result(answer, codec, in_place, message["new"]))
        if isinstance(result, BaseException):
            self.raised.append(result)
            self.failed = self.failed or isinstance(result, ProgramFailed)
            raise result
        value, after = result
        if in_place:
            for argument, changed in zip([*args, *kwargs.values()], after):
                _update(argument, changed)
        return value

    def _message(self, codec: Codec, args: list, kwargs: JsonObject) -> JsonObject:
        try:
            message = {"args": codec.encode(args), "kwargs": codec.encode(kwargs)}
            return {**message, "objects": codec.attributes()}
        except TypeError as error:
            text = f"a test calls the program with what is no plain data: {error}"
            self.fault = RowError(text)
            raise self.fault from error
        except ValueError as error:
            self.failed = True
            raise ProgramFailed(f"it cannot be called: {error}") from error

    def _answer(self, message: JsonObject) -> JsonObject:
        try:
            return self._ask(message)
        except (ProgramFailed, StartsProcesses) as error:
            raise self._fail(error) from None

    def _fail(self, error: ProgramFailed | StartsProcesses) -> ProgramFailed | StartsProcesses:
        self.failure = error
        return error

    def _guarded(self, read: Callable[[], Any]) -> Any:
        """Returns what `read` reads of an answer. Raises ProgramFailed for a malformed answer."""
        try:
            return read()
        except Exception as error:
            raise self._fail(ProgramFailed("it wrote a malformed answer")) from error

    def _codec(self, is_new: bool = False) -> Codec:
        classes = {
            name: kind
            for name, kind in self._names.items()
            if isinstance(kind, type) and kind.__module__ == "tests"
        }
        find = self._finder(is_new)
        codec: Codec = Codec(classes, lambda value: self._keep(value, codec), find)
        return codec

    def _keep(self, value: Json, codec: Codec) -> JsonObject:
        """Returns the encoding of an object of the test that is no plain data."""
        if isinstance(value, ProgramObject):
            return {"kept": value._compass.number}
        if id(value) in self._numbers:
            return {"kept": self._numbers[id(value)]}
        if hasattr(value, "__next__"):
            return {"iterator": [codec.encode(item) for item in islice(value, MOST_ITEMS)]}
        if isinstance(value, _VIEWS):
            return codec.encode(list(value))
        name = getattr(value, "__name__", "")
        if callable(value) and getattr(builtins, name, None) is value:
            return {"builtin": name}
        raise TypeError(f"a {type(value).__name__} cannot be handed over")

    def _finder(self, is_new: bool) -> Callable[[str, Json], Any]:
        def find(form: str, content: Json) -> Any:
            number, group, kind, names = content
            if form != "kept" or not isinstance(number, int) or not isinstance(kind, str):
                raise ValueError(f"unknown form {form!r:.40}")
            if (number, is_new) not in self._objects:
                value = self._new_object(Reference(self, number, kind, is_new), group, names)
                self._objects[number, is_new] = value
                self._numbers[id(value)] = number
            return self._objects[number, is_new]

        return find

    def _new_object(self, reference: Reference, group: str, names: Sequence[str]) -> Any:
        if group == "error":
            return self._errors.setdefault(names[0], self._error_class(names))
        if group == "class":
            return ProgramClass(reference)
        value = ProgramObject(reference)
        if group == "generator":
            return self.items(value)
        return self._coroutine(value) if group == "coroutine" else value

    async def _coroutine(self, value: ProgramObject) -> Json:
        return self.request("await", (value,))

    def _error_class(self, names: Sequence[str]) -> type[BaseException]:
        base = next(kind for name in names[1:] if (kind := self._error(name)) is not None)
        return type(str(names[0]), (base,), {"__module__": "tests"})

    def _error(self, name: Json) -> type[BaseException] | None:
        kind = self._names.get(name, self._errors.get(name, getattr(builtins, str(name), None)))
        return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None

    def _decode(self, answer: JsonMapping, codec: Codec) -> Json:
        codec.read_attributes(answer["objects"])
        return codec.decode(answer["value"])

    def _result(
        self, answer: JsonMapping, codec: Codec, in_place: bool, is_new: bool
    ) -> tuple[Any, list] | BaseException:
        """Returns the result of an operation and its arguments afterwards, or the exception."""
        if "raised" in answer:
            return self._exception(answer)
        if "unsendable" in answer:
            return ProgramFailed(f"it returned no plain data: {answer['unsendable']!s:.200}")
        # with in_place the objects of the test itself change; else it gets new ones
        codec = codec if in_place else self._codec(is_new)
        value = self._decode(answer, codec)
        after = codec.decode(answer["after"])
        if not isinstance(after, list):
            raise TypeError
        return value, after

    def _exception(self, answer: JsonMapping) -> BaseException:
        """Returns the exception that the program claims to have raised. Its class is the first that
        the row's setup, the test's own names or Python define.
        """
        text, state = str(answer.get("text", "")), {}
        args: Json = [text]
        if "args" in answer:
            args, state = self._codec().decode(answer["args"])
        for kind in map(self._error, filter(lambda x: isinstance(x, str), answer["raised"])):
            if kind is None:
                continue
            if issubclass(kind, StopIteration | StopAsyncIteration):
                break  # as in a generator: it would end a test's loop
            with contextlib.suppress(Exception):
                error = kind(*args)
                for name, value in state.items():
                    setattr(error, name, value)
                return error
        return RuntimeError(f"{answer['raised'][:1]}: {text}")


def _update(argument: Json, changed: Json) -> None:
    """Changes a test's argument as the program changed it."""
    if type(argument) is not type(changed):
        return
    if isinstance(argument, list | bytearray):
        argument[:] = changed
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(changed)
    elif type(argument).__name__ == "deque":
        argument.clear()
        argument.extend(changed)
    elif type(argument).__module__ == "numpy" and argument.ndim:
        argument[...] = changed
