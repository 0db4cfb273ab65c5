"""YAML as JSON's values: text keys, each once, with merge keys; an error names its line."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from compass_jax.base.aliases import Json
from compass_jax.base.untrusted import MOST_DEPTH, MOST_DIGITS
from compass_jax.config.errors import ConfigError

MOST_NODES = 100_000  # with those that aliases repeat
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_KINDS = {"str", "int", "float", "bool", "null", "timestamp", "seq", "map"}
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.[\d_]+)[eE][-+]?\d+$")


def parse_yaml(text: str) -> Json:
    """Returns the content of a YAML text. It reads 1e-6 as a number and a date as a text.

    Raises ConfigError, with the line, for a text that is no YAML, a repeated key, a key that is no
    text, a value that is none of its type, other types than JSON's, and nesting or aliases beyond
    all use.
    """
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):
        def construct_object(self, node: Any, deep: bool = False) -> Json:
            try:
                value = super().construct_object(node, deep)
            except ConfigError:
                raise
            except (ValueError, OverflowError, KeyError, AttributeError) as error:
                kind = node.tag.removeprefix(_TAG)
                _refuse(node, f"{node.value!r:.40} is no {kind} ({str(error)[:80]})")
            is_long = type(value) is int and abs(value) >= 10**MOST_DIGITS
            if is_long:
                _refuse(
                    node, f"the integer {node.value[:20]}... has more than {MOST_DIGITS} digits"
                )
            # A date is checked, and stays a text: settings have dates as texts.
            return node.value if node.tag == f"{_TAG}timestamp" else value

    Loader.add_implicit_resolver(f"{_TAG}float", _NUMBER, list("-+.0123456789"))
    try:
        _check_depth(yaml.parse(text, Loader))
        loader = Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check(node, {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        before = text[: getattr(error, "position", 0)]  # an unacceptable character
        line = f"line {(mark.line if mark else before.count(chr(10))) + 1}: "
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        reason = " ".join(str(problem).split())[:200]
        raise ConfigError(f"{line}it is no YAML: {reason}") from error


def _check_depth(events: Any) -> None:
    """Raises ConfigError for deep nesting, on which the composer would exhaust the stack."""
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > MOST_DEPTH:
            _refuse(event, f"nested deeper than {MOST_DEPTH} levels")


def _check(node: Any, sizes: dict[int, int]) -> int:
    """Returns the number of nodes below a node, each alias counted. Raises ConfigError for what
    JSON could not say. `sizes`: the nodes so far; 0 while a node is being counted.
    """
    if (size := sizes.get(id(node))) is not None:
        if not size:
            _refuse(node, "it contains itself, by an alias")
        return size
    sizes[id(node)] = 0
    if node.tag.removeprefix(_TAG) not in _KINDS:
        _refuse(node, f"a value of the type {node.tag[:80]} is no setting")
    count, parts = 1, node.value if isinstance(node.value, list) else ()
    keys: set[str] = set()
    for part in parts:
        if isinstance(part, tuple):
            key, part = part
            _check_key(key, node, keys)
        count += _check(part, sizes)
    if count > MOST_NODES:
        _refuse(node, f"aliases repeat it to more than {MOST_NODES:,} values")
    sizes[id(node)] = count
    return count


def _check_key(key: Any, mapping: Any, before: set[str]) -> None:
    if key.tag not in (f"{_TAG}str", _MERGE):
        name = key.value if isinstance(key.value, str) else "a list or a mapping"
        _refuse(key, f"the key {name or 'null':.40} is no text; put it into quotes")
    if key.value in before:
        line = mapping.start_mark.line + 1
        raise ConfigError(f"{key.value[:80]}: is there twice, in the mapping of line {line}")
    before.add(key.value)


def _refuse(node: Any, problem: str) -> NoReturn:
    raise ConfigError(f"line {node.start_mark.line + 1}: {problem}")
