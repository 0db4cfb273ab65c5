"""Hooks of mkdocs: the site gets the pictures of benchmarks/results/ and the pages on functions.
Links to the source of these lead there, and other links out of docs/ to the project's repository,
since the site has no such files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from references import API, PACKAGE, api_pages

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "benchmarks" / "results"
REPOSITORY = os.environ.get("COMPASS_DOCS_REPOSITORY", "")  # where a built site finds the files
API_PLACES = {
    f"{PACKAGE}/{module.replace('.', '/')}.py": f"api-{name}.md#{PACKAGE}{module.replace('.', '')}"
    for name, (_, modules) in API.items()
    for module in modules
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Returns the site's files with the pictures of benchmarks and the pages on functions."""
    from mkdocs.structure.files import File

    for picture in PICTURES.glob("*.png"):
        files.append(File.generated(config, f"img/{picture.name}", abs_src_path=str(picture)))
    for name, text in api_pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Returns the page with links into the project that do not depend on the site."""
    folder = (ROOT / "docs" / page.file.src_path).parent

    def changed(match: re.Match[str]) -> str:
        picture, text, link = match.groups()
        path = link.partition("#")[0]
        if "://" in link or not path:
            return match[0]
        target = Path(os.path.normpath(folder / path))
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if picture and target.parent == PICTURES:
            site = ROOT / "docs" / "img" / target.name
            return f"![{text}]({Path(os.path.relpath(site, folder)).as_posix()})"
        inside = target.relative_to(ROOT).as_posix()
        if inside in API_PLACES:
            reference = Path(os.path.relpath(ROOT / "docs" / "reference", folder)).as_posix()
            return f"[{text}]({reference}/{API_PLACES[inside]})"
        if picture or not REPOSITORY:
            return f"{text or inside} (`{inside}`)"
        return f"[{text}]({REPOSITORY}/{inside})"

    return _LINK.sub(changed, markdown)
