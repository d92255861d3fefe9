"""Hooks for mkdocs that add files outside docs/ to the site and rewrite links to them."""

# The extra `docs` may be missing.
# pyright: reportMissingImports=false

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
# Files outside docs/, with their pages on the site.
_OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "configs/smollm2_135m/drafter/README.md": "benchmarks/smollm2-head.md",
}
_LINK = re.compile(r"(\]\()((?!\w+:)[^)#\s]+)([^)]*\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages for files outside docs/ to the site."""
    for source, page in _OUTSIDE.items():
        content = (_ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite relative links of a page so that they lead to the pages of the site."""
    del config, files
    place = page.file.src_uri
    source = next((one for one, name in _OUTSIDE.items() if name == place), f"docs/{place}")

    def lead(link: re.Match[str]) -> str:
        path = os.path.normpath(_ROOT / Path(source).parent / link[2])
        inside = os.path.relpath(path, _ROOT)
        target = _OUTSIDE.get(inside, inside.removeprefix("docs/"))
        return link[1] + os.path.relpath(target, Path(place).parent) + link[3]

    return _LINK.sub(lead, markdown)
