"""Command lines in which something else takes the place of CONFIG."""

from __future__ import annotations

import argparse

from compass_jax.commands.command_line import QUICK, own_options


def with_config(words: list[str]) -> list[str]:
    """`words` with an empty CONFIG where --model, or `eval --checkpoint`, takes its place: a
    setting's value would be read as one.
    """
    command, rest = words[:1], words[1:]
    if command == ["eval"]:
        without = _of_a_run(rest)
    else:
        model = any(word == "--model" or word.startswith("--model=") for word in rest)
        without = command in ([name] for name in QUICK) and model and rest[0].startswith("-")
    return [*command, "", *rest] if without else words


def _of_a_run(words: list[str]) -> bool:
    """Whether `eval` is to take a run's own configuration: it has --checkpoint, and of the words
    that belong to no option of its own, none but a setting's value is left. A value stands after
    the name of its setting.
    """
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    own_options(own, "eval")
    try:
        args, left = own.parse_known_args(words)
    except argparse.ArgumentError:  # the command itself says what is wrong
        return False
    after_name = False
    for word in left:
        if word.startswith("-"):
            after_name = "=" not in word
        elif not after_name:
            return False  # CONFIG
    return args.checkpoint is not None
