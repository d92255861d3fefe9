"""Answers as Markdown in a Chromium: as markdown-it reads them, and hostile ones as text."""

from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from fake_engine import FakeEngine
from markdown_it import MarkdownIt
from playwright.sync_api import Page
from servers import serving

from tools.page_screenshot import browser_page, chromium

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
]

# Shown at once where `whole`, else as if it came in pieces; with every token a character.
SHOW = """([text, whole]) => {
    window.hacked = 0;
    const box = $("turns");
    box.replaceChildren();
    const view = { written: () => false, colours: () => false, atEnd: () => false, toEnd: () => 0 };
    const answer = new Answer(box, "", view);
    const size = whole ? Math.max(1, text.length) : 7;
    const began = performance.now();
    for (let at = 0; at < text.length; at += size) {
        const piece = text.slice(at, at + size);
        answer.take([{ text: piece, call: at, origin: null }], piece);
        clearTimeout(answer.waiting);
        answer.waiting = 0;
        answer.show();
    }
    const seconds = (performance.now() - began) / 1000;
    const streamed = answer.box.innerHTML;
    answer.finish();
    return { html: answer.box.innerHTML, streamed, text: answer.box.textContent, seconds };
}"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with serving(FakeEngine()) as base, browser_page(360) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: asked.append(f"dialog {dialog.message}"))
        page.goto(base)
        page.wait_for_selector("#model:not(:text('connecting'))")
        yield page
        # No text makes the page ask for anything, here or elsewhere.
        assert set(asked) <= {f"{base}/", f"{base}/v1/models", "data:,"}


def show(page: Page, text: str, *, whole: bool = True) -> dict[str, Any]:
    return page.evaluate(SHOW, [text, whole])


class Structure(HTMLParser):
    """Tags and texts in order, by which both renderers are compared."""

    # Frames that the page puts around code and tables; markdown-it's parts of tables.
    FRAMES = ("div", "figure", "figcaption", "button", "thead", "tbody", "span")

    def __init__(self, html: str, levels: int) -> None:
        super().__init__()
        self.found: list[tuple[str, ...]] = []
        self._levels, self._hidden = levels, 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag == "figcaption"
        if tag not in self.FRAMES:
            kept = [value or "" for name, value in attrs if name in ("href", "start")]
            self.found.append(("<", self._level(tag), *kept))

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag == "figcaption"
        if tag not in self.FRAMES and tag not in ("hr", "br"):
            self.found.append((">", self._level(tag)))

    def handle_data(self, data: str) -> None:
        if self._hidden or not data.strip():
            return
        words = data.strip()
        if self.found and self.found[-1][0] == "text":
            words = f"{self.found.pop()[1]} {words}"
        self.found.append(("text", " ".join(words.split())))

    def _level(self, tag: str) -> str:
        if tag[0] == "h" and tag[1:].isdecimal():
            return f"h{min(6, int(tag[1:]) + self._levels)}"
        return tag


WELL_WRITTEN = {
    "paragraphs": "One line\nand another.\n\nA second with `code`, **strong**, *em* text.",
    "nested marks": "**strong with *em* and `code`** and ~~gone~~ and __also strong__ and _em_.",
    "no marks": "2 * 3 * 4 = 24, snake_case_name, a * b, **unclosed, `unclosed and 5 < 6 & 7 > 2",
    "escapes": r"\*not em\* and \`not code\` and a \\ backslash",
    "headings": "# One\n\n## Two ##\n\n### Three with `code`\n\ntext\n#not one",
    "rule": "above\n\n---\n\nbelow\n\n***",
    "fence": "before\n\n```python\ndef f(x):\n    return x  # **no** marks\n```\n\nafter",
    "fences in a fence": "````markdown\n```py\nx\n```\n````\n\nafter",
    "unclosed fence": "```\nx = 1\ny = 2",
    "tildes": "~~~\nx ``` y\n~~~",
    "bullets": "- one\n- two **strong**\n- three",
    "numbers": "3. three\n4. four",
    "nested list": "- one\n  - inner\n  - other\n- two\n  1. first\n  2. second",
    "list and text": "Some:\n\n* a\n* b\n\nThen text.",
    "code in a list": "- item\n\n  ```\n  x = 1\n  ```\n- next",
    "quote": "> quoted **text**\n> goes on\n\nafter",
    "list in a quote": "> - one\n> - two",
    "table": "| a | b |\n|---|:-:|\n| 1 | `x` |\n| 2 | **y** |\n\nafter",
    "link": "See [the page](https://example.org/a_b) here.",
    "double ticks": "``a ` b`` end",
    "arabic": "مرحبا **بالعالم**",
}


@pytest.mark.parametrize("whole", [True, False], ids=["at once", "in pieces"])
@pytest.mark.parametrize("name", WELL_WRITTEN)
def test_what_is_well_written_reads_as_markdown_it_has_it(
    page: Page, name: str, whole: bool
) -> None:
    text = WELL_WRITTEN[name]
    # Items of tight lists have no paragraphs there.
    rules = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    theirs = Structure(rules.render(text), levels=2).found
    ours = Structure(show(page, text, whole=whole)["html"], levels=0).found

    def without_paragraphs(found: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        return [one for one in found if one[1] not in ("p", "s", "del")]

    assert without_paragraphs(ours) == without_paragraphs(theirs)


HOSTILE = {
    "script": "<script>window.hacked = 1</script>",
    "handler": '<img src=x onerror="window.hacked = 1"> <svg onload=alert(1)>',
    "frame": '<iframe src="https://example.org"></iframe><style>*{display:none}</style>',
    "javascript": "[a](javascript:window.hacked=1) [b](JaVaScRiPt:alert(1)) [c](&#106;avascript:1)",
    "other schemes": "[a](data:text/html,<script>1</script>) [b](vbscript:x) [c](file:///x)",
    "line breaks in a scheme": "[a](java\nscript:alert(1)) [b](java\tscript:alert(1))",
    "quotes in an address": '[a](https://x.org/"onclick="window.hacked=1) <https://x.org>',
    "handler in a title": '[a](https://x.org "t\\" onclick=\\"window.hacked=1")',
    "picture": "![a](https://example.org/spy.png) ![b](//example.org/spy.png)",
    "language": '```"><img src=x onerror=window.hacked=1>\ncode\n```',
    "end of a script": "```html\n</code></pre></script><script>window.hacked=1</script>\n```",
    "entities": "&lt;script&gt;alert(1)&lt;/script&gt;",
    "nested fences": "```\n" * 999,
    "prototype": "__proto__ [constructor](https://x.org) `toString`",
    "deep quotes": ">" * 5000 + " a",
    "deep lists": "\n".join("  " * i + "- a" for i in range(300)),
    "long line": "a" * 100_000,
    "long code": "```\n" + "a" * 100_000 + "\n```",
    "stars": "*" * 100_000,
    "open stars": "*a " * 33_000,
    "open underscores": "_a " * 33_000,
    "open brackets": "[" * 100_000,
    "open links": "[a](" * 25_000,
    "ticks": "`" * 100_000,
    "runs of ticks": " ".join("`" * i for i in range(1, 440)),
    "bars": "|" * 100_000 + "\n" + "|-" * 900 + "|",
    "dashes": "- " * 50_000,
    "broken rules": ("- " * 990 + "x\n") * 150,
    "spaces in headings": ("# a" + " " * 1990 + "b\n") * 150,
    "ends of addresses": ("http://a" + ")" * 990 + " ") * 300,
    "hashes": "# " + "#" * 100_000,
    "spaces": " " * 100_000 + "a",
    "addresses": "https://" * 12_000,
    "backslashes": "\\" * 100_000,
    "lines": "a\n" * 50_000,
    "accents": "a" + "\u0301" * 20_000,
}
ALLOWED = {
    *("p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "a", "code", "pre"),
    *("strong", "em", "del", "table", "tbody", "tr", "th", "td", "div", "figure", "figcaption"),
    *("span", "button"),
}
ATTRIBUTES = {"class", "dir", "href", "title", "target", "rel", "start", "type", "data-text"}
FOUND = """() => {
    const elements = [...document.querySelectorAll("#turns .text *")];
    return {
        tags: [...new Set(elements.map((one) => one.localName))],
        attributes: [...new Set(elements.flatMap((one) => one.getAttributeNames()))],
        protocols: [...new Set(elements.filter((one) => one.href).map((one) => one.protocol))],
        hacked: window.hacked, title: document.title, width: document.documentElement.scrollWidth,
    };
}"""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_text(page: Page, name: str) -> None:
    shown = show(page, HOSTILE[name])
    found = page.evaluate(FOUND)
    assert set(found["tags"]) <= ALLOWED
    assert set(found["attributes"]) <= ATTRIBUTES
    assert set(found["protocols"]) <= {"http:", "https:", "mailto:"}
    assert (found["hacked"], found["title"]) == (0, "redrafter")
    assert found["width"] <= 360
    assert shown["seconds"] < 5


def test_tags_are_shown_as_they_are_written(page: Page) -> None:
    for name in ("script", "handler", "frame", "entities"):
        assert show(page, HOSTILE[name])["text"] == HOSTILE[name]


def test_characters_that_turn_the_direction_are_shown_by_their_numbers(page: Page) -> None:
    text = "`a\u202eb` and \u2066c\u2069 [x\u202ey](https://example.org)"
    shown = show(page, text)["text"]
    assert shown == "aU+202Eb and U+2066cU+2069 xU+202Ey"


def test_a_link_opens_elsewhere_and_tells_nothing(page: Page) -> None:
    show(page, "[a](https://example.org/x)")
    link = page.locator("#turns .text a")
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    assert link.get_attribute("target") == "_blank"
    assert link.get_attribute("title") == "https://example.org/x"


def test_no_file_of_the_page_makes_html_of_text() -> None:
    from places import ROOT

    for path in (ROOT / "redrafter_jax" / "serving" / "web").glob("*.js"):
        code = path.read_text(encoding="utf-8")
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in code, path
