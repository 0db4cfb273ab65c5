"""Manifests with changed content and a valid digest."""

import json

from compass_jax.weights import digests


def edit_manifest(where, change):
    """Changes the manifest's content and recomputes its digest."""
    file = where / "manifest.json"
    content = json.loads(file.read_text())
    del content["digest"]
    content = change(content) or content
    text = json.dumps(content)
    file.write_text(f'{text[:-1]}, "digest": "{digests.of_bytes(text.encode()).value}"}}')
