"""The bytes that tokens stand for, by how a vocabulary spells them."""

from __future__ import annotations

import re


def _byte_level() -> dict[str, int]:
    """Byte-level BPE spells a byte as its own character where that is printable, and by the
    characters from 256 on otherwise.
    """
    own = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [b for b in range(256) if b not in set(own)]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}


BYTES = _byte_level()


def bytes_of(spelling: str, text: str) -> bytes:
    """The bytes of a token that the vocabulary spells so and that is decoded as `text`, in which
    part of a character is U+FFFD.
    """
    if text.isascii():
        return text.encode()
    if (part := re.fullmatch("<0x([0-9A-F]{2})>", spelling)) is not None:
        return bytes.fromhex(part[1])
    data = bytes(BYTES.get(character, 0) for character in spelling)
    # other vocabularies than byte-level ones spell their tokens as they are
    return data if data.decode(errors="replace") == text else text.encode()
