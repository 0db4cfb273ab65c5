"""A page as one self-contained file, with its data as JSON."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources

from compass_jax.base.aliases import Json

_NAMES = "dom charts overview curves funnel groups answers mismatch settings compare main"
SCRIPTS = tuple(_NAMES.split())


def embedded(value: Json) -> str:
    """Returns JSON for use inside a <script>. Every "<" is escaped, so that no text of a run ends
    the element or begins a comment. Raises ValueError for a number that is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def size_of(value: Json) -> int:
    """Returns the number of bytes that `value` takes on a page."""
    return len(embedded(value).encode(errors="replace"))


def page(title: str, data: Json) -> bytes:
    """Returns the whole page in UTF-8. Its policy allows only the page's script and style, by their
    hashes: no other script runs and no address is contacted, whatever `data` contains.
    """
    style = _resource("page.css")
    parts = "\n".join(_resource(f"{name}.js") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{parts}\n}})();\n'
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}';"
        " base-uri 'none'; form-action 'none'"
    )
    body = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
<noscript>This page is drawn by its script; switch JavaScript on.</noscript>
<main id="page"></main>
<script type="application/json" id="data">{embedded(data)}</script>
<script>{script}</script>
</body>
</html>
"""
    return body.encode(errors="replace")


def _resource(name: str) -> str:
    return (resources.files("compass_jax.runs.report") / "web" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
