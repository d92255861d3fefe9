"""The chat page as one HTML document, and its Content-Security-Policy."""

import base64
import hashlib
import re
from importlib.resources import files
from typing import NamedTuple

_PART = re.compile(r'<link rel="stylesheet" href="([\w.]+)">|<script src="([\w.]+)"></script>')


class Page(NamedTuple):
    """The chat page.

    Attributes:
      document: the HTML with inline style and scripts.
      policy: the Content-Security-Policy. It forbids connections to other hosts, and allows only
        the document's own style and scripts, by their digests.
    """

    document: str
    policy: str


def read_page() -> Page:
    """Assemble the page from the files in the folder `web`."""
    folder = files("redrafter_jax.serving") / "web"
    digests: dict[str, list[str]] = {"style": [], "script": []}

    def inline(part: re.Match[str]) -> str:
        tag = "style" if part[1] else "script"
        text = (folder / (part[1] or part[2])).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        digests[tag].append(f"'sha256-{digest}'")
        return f"<{tag}>{text}</{tag}>"

    document = _PART.sub(inline, (folder / "page.html").read_text(encoding="utf-8"))
    policy = (
        f"default-src 'none'; script-src {' '.join(digests['script'])}; "
        f"style-src {' '.join(digests['style'])}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(document, policy)
