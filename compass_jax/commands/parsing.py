"""The words of a command as its options, and the text of its help."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compass_jax.commands.table import BY_NAME, exit_statuses

HELP = ("-h", "--help")


def is_configured(name: str) -> bool:
    """Returns whether a command takes a configuration and its settings."""
    from compass_jax.commands.options import Configured

    return issubclass(BY_NAME[name].options_class(), Configured)


def repeated_option(name: str, arguments: Sequence[str]) -> str:
    """Returns why an option of several values is given more than once, or an empty string."""
    from tyro.conf import UseAppendAction

    from compass_jax.config.ranges import lists_of

    lists = lists_of(BY_NAME[name].options_class(), UseAppendAction)
    counts = Counter(x.partition("=")[0].replace("_", "-") for x in arguments if x[:2] == "--")
    for option, count in counts.items():
        if count > 1 and option[2:].replace("-", "_") in lists:
            return (
                f"{option} is given {count} times, and the last would replace the others; give all"
                f" its values after one {option}"
            )
    return ""


def parse(name: str, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """Returns the options of a command, and the settings after them if it is configured.

    CONFIG may follow options; a word after an unknown option is the value of a setting.
    """
    if not is_configured(name):
        return _by_tyro(name, arguments), []
    # The empty word fills the position of CONFIG, so that no value of a setting is taken for it.
    options, settings = _by_tyro(name, ["", *arguments], return_unknown_args=True)
    if settings and not settings[0].startswith("-"):
        options = replace(options, config=settings.pop(0))
    return options, settings


def _by_tyro(name: str, arguments: Sequence[str], **form: Any) -> Any:
    import tyro

    about = BY_NAME[name].about
    return tyro.cli(
        BY_NAME[name].options_class(),
        prog=f"compass {name}",
        description=f"{about[0].upper()}{about[1:]}.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
        **form,
    )


def help_text(name: str) -> str:
    """Returns the text of `compass NAME --help`, without the settings of a configuration."""
    from compass_jax.commands.settings import describe

    describe(BY_NAME[name].options_class())
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        _by_tyro(name, ["--help"])
    return f"{tidy_help(text.getvalue())}\n\n{exit_statuses()}"


def tidy_help(text: str) -> str:
    """Returns tyro's help text within 80 columns, without padding and empty defaults."""
    text = re.sub(r"(?:\s*\(default: (?:''|False|None|)\))? *$", "", text, flags=re.M)
    lines = [textwrap.wrap(x, 80, subsequent_indent=" " * 6) or [""] for x in text.splitlines()]
    return "\n".join(part for line in lines for part in line).rstrip()
