"""Tokens of a folder that tokenizer.json lacks, added with the ids that transformers gives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compass_jax.base.aliases import JsonObject
from compass_jax.base.errors import UserError
from compass_jax.base.token_ids import (
    NAMED,
    TOKENIZER_CONFIG,
    declared_tokens,
    further_tokens,
    token_fields,
)


def add_tokens(
    backend: Any, folder: str | Path, config: JsonObject, error: type[UserError]
) -> list[str]:
    """Adds the tokens of a folder's other files to a `tokenizers.Tokenizer`. Returns the special
    tokens that `config` names.

    The added ones are, in the order that decides their ids: the declared tokens
    (`declared_tokens`), also those that tokenizer.json has with other flags; then the special
    tokens that `config` names and no file has. An end or padding token without an id is not added.

    Raises `error` if a declared token would get another id than its file says.
    """
    from tokenizers import AddedToken

    declared = sorted(declared_tokens(folder, config, error).items())
    named = dict(_named(folder, config, error))
    special = {fields["content"] for fields in named.values()}
    present = set(map(repr, backend.get_added_tokens_decoder().values()))
    expected = {}  # ids of the tokens that tokenizer.json lacks
    tokens = []
    for index, fields in declared:
        token = AddedToken(**fields)
        if repr(token) not in present:
            token.special = token.special or token.content in special
            tokens.append(token)
        if backend.token_to_id(token.content) is None:
            expected[token.content] = index
    backend.add_tokens(tokens)
    for content, index in expected.items():
        if (actual := backend.token_to_id(content)) != index:
            raise error(
                f"{folder}: tokenizer_config.json or added_tokens.json gives the token"
                f" {content[:80]!r} the id {index}, and after those of tokenizer.json comes"
                f" {actual}: use the files that the model was published with"
            )
    for name, fields in named.items():
        without_id = backend.token_to_id(fields["content"]) is None
        if without_id and name not in ("eos_token", "pad_token"):
            backend.add_tokens([AddedToken(**{**fields, "special": True})])
    return [fields["content"] for fields in named.values()]


def _named(
    folder: str | Path, config: JsonObject, error: type[UserError]
) -> Iterator[tuple[str, JsonObject]]:
    """Yields (name, fields) of the special tokens, in the order of transformers."""
    names = [name for name in config if name.endswith("_token") and name not in NAMED]
    tokens = {name: config[name] for name in NAMED if config.get(name) is not None}
    tokens |= {name: config[name] for name in names if isinstance(config[name], str)}
    further = further_tokens(config)
    if not isinstance(further, dict):
        further = {f"additional_special_tokens.{i}": token for i, token in enumerate(further)}
    for name, token in {**tokens, **further}.items():
        yield name, token_fields(token, f"{folder}/{TOKENIZER_CONFIG}: {name}", error)
