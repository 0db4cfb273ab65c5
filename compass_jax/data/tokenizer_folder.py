"""What a tokenizer folder says beside its vocabulary: special tokens and the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compass_jax.errors import UserError
from compass_jax.untrusted import read_text

MOST_TEMPLATE = 2**20  # bytes


class TokenizerError(UserError):
    """A tokenizer folder or chat template that cannot be used; the message says why."""


def _text_of(token: Any, where: str) -> str:
    """A token's text; it is written as a string or as {"content": ...}."""
    text = token.get("content") if isinstance(token, dict) else token
    if not (isinstance(text, str) and text):
        raise TokenizerError(
            f"{where} is {str(token)[:80]}: it must be a text, or an object whose content is one"
        )
    return text


def additional_tokens(folder: Path, config: dict[str, Any]) -> list[str]:
    """The control tokens that have no name, such as those that open a turn."""
    where = f"{folder / 'tokenizer_config.json'}: additional_special_tokens"
    tokens = config.get("additional_special_tokens") or []
    if not isinstance(tokens, list):
        raise TokenizerError(f"{where} is a {type(tokens).__name__}: it must be a list")
    return [_text_of(token, f"{where}[{i}]") for i, token in enumerate(tokens)]


def special_tokens(folder: Path, config: Any) -> dict[str, str]:
    """The texts of bos, eos, pad and unk by name, of those that there are."""
    file = folder / "tokenizer_config.json"
    if not isinstance(config, dict):
        raise TokenizerError(
            f"{file} holds a {type(config).__name__}: it must be an object with eos_token and the"
            " like"
        )
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        if token is not None:
            tokens[name] = _text_of(token, f"{file}: {name}")
    return tokens


def chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template file wins over the config's; of several named templates the default one
    is used.
    """
    file, template = folder / "chat_template.jinja", config.get("chat_template")
    if file.is_file():
        return read_text(file, error=TokenizerError, most_bytes=MOST_TEMPLATE)
    where = f"{folder / 'tokenizer_config.json'}: chat_template"
    if isinstance(template, list):
        named = [
            entry
            for entry in template
            if isinstance(entry, dict) and entry.get("name") == "default"
        ]
        if len(named) != 1:
            raise TokenizerError(
                f"{where} is a list with {len(named)} templates named default: it must have one"
            )
        template = named[0].get("template")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(
            f"{where} is a {type(template).__name__}: it must be a text, or a list of named ones"
        )
    if template is not None and len(template) > MOST_TEMPLATE:
        raise TokenizerError(
            f"{where} has {len(template):,} characters, more than {MOST_TEMPLATE:,}"
        )
    return template
