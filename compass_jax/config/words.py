"""Words of a command line as values of settings."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from types import NoneType

from compass_jax.base.aliases import Hint, Json
from compass_jax.base.untrusted import parse_json
from compass_jax.config.errors import ConfigError
from compass_jax.config.ranges import describe_value, options, tuples

_TRUTH = {"true": True, "false": False}
_ANY_OPTION = (int, float, str, bool, tuple)  # values of config.verifiers.Options


class Words(tuple[str, ...]):
    """The words after a setting's name on the command line."""

    def value(self, hint: Hint, key: str) -> Json:
        """Returns the value of type `hint` that the words stand for.

        A word that stands for none stays text, which the check of types reports. Raises ConfigError
        for no word or several where a setting has one value.
        """
        kinds = [_plain(option) for option in options(hint)]
        lists = [kind for kind in kinds if typing.get_origin(kind) is tuple]
        if lists and _holds_options(lists[0]):
            return options_of(" ".join(self), key)
        if lists and not (len(self) == 1 and str in kinds):
            return _entries(list(self), lists[0])
        if len(self) != 1:
            fault = (
                f"has {len(self)} values, {describe_value(tuple(self))}" if self else "is missing"
            )
            raise ConfigError(f"--{key}: its value {fault}; give one after it")
        return _scalar(self[0], kinds)

    def entries(self, key: str) -> list[Json]:
        """Returns the entries of a list: the words, or those of one word that is a list in JSON.
        Raises ConfigError for a word that begins like one and is none.
        """
        if len(self) != 1 or not self[0].startswith("["):
            return list(self)
        entries: list[Json] = parse_json(self[0], key, error=ConfigError)
        return entries


def read_arguments(arguments: Sequence[str]) -> dict[str, Words]:
    """Returns the settings among the words of a command line, `--rl.steps 3` or `--rl.steps=3`, by
    their names with "_"; the last of one name counts. Raises ConfigError for a word before them.
    """
    settings: dict[str, list[str]] = {}
    name = ""
    for word in arguments:
        option, equals, value = word.partition("=")
        if word.startswith("--") or (equals and not name):
            name = option.removeprefix("--").replace("-", "_")
            settings[name] = [value] if equals else []
        elif name:
            settings[name].append(word)
        else:
            raise ConfigError(f"{word[:80]}: it is no setting; write --NAME VALUE")
    return {name: Words(words) for name, words in settings.items()}


def options_of(text: str, key: str = "options") -> Json:
    """Returns the options in a JSON object, or in a list of its pairs; `key` begins an error."""
    value = parse_json(text, key, error=ConfigError)
    return tuples([list(pair) for pair in value.items()] if isinstance(value, dict) else value)


def _plain(hint: Hint) -> Hint:
    """Returns a type without its rule."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _holds_options(hint: Hint) -> bool:
    pair = typing.get_args(typing.get_args(hint)[0])
    return bool(pair) and options(pair[-1]) == _ANY_OPTION


def _entries(words: list[str], hint: Hint) -> Json:
    """Returns the tuple at the beginning of `words`, whose words are removed."""
    inner, entries = typing.get_args(hint), []
    if inner[-1] is Ellipsis:
        while words:
            entries.append(_entry(words, inner[0]))
    else:
        entries = [_entry(words, kind) for kind in inner if words]
    return tuple(entries)


def _entry(words: list[str], hint: Hint) -> Json:
    if typing.get_origin(_plain(hint)) is tuple:
        return _entries(words, _plain(hint))
    return _scalar(words.pop(0), [_plain(option) for option in options(hint)])


def _scalar(word: str, kinds: Sequence[Hint]) -> Json:
    if NoneType in kinds and word.lower() == "none":
        return None
    if bool in kinds:
        return _TRUTH.get(word.lower(), word)
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(word)
            except ValueError:
                continue
    return word
