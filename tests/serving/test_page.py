"""The page in a Chromium without a window: asked, streamed, stopped, and compared."""

import re
from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from playwright.sync_api import Page, expect
from servers import LINES, ROOMY, serving, wait_until

from redrafter_jax.text.chat_template import NO_TEMPLATE, ChatTemplate
from tools.page_screenshot import ask, browser_page, chromium

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
]

# Milliseconds; the machine may be slow.
expect.set_options(timeout=120_000)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(slots=2, seconds=0.02)


@pytest.fixture(params=["chat", "text"])
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    return LINES if request.param == "chat" else NO_TEMPLATE


@pytest.fixture
def page(engine: FakeEngine, template: ChatTemplate) -> Iterator[Page]:
    served = serving(engine, template=template, limits=ROOMY)
    with served as base, browser_page() as page:
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
        page.goto(base)
        expect(page.locator("#model")).to_contain_text("tiny, 100000 tokens of context")
        yield page
        # The browser's own words for a status of 400 are no fault of the page's.
        assert not [fault for fault in faults if "status of 400" not in fault]


def test_the_same_text_comes_with_and_without_speculation(
    page: Page, template: ChatTemplate
) -> None:
    ask(page, "héllo <b>", tokens=22, seed=0, compare=True)
    end = "\n" if template is LINES else ""
    expected = ((f"héllo <b>{end}") * 3).encode()[:22].decode(errors="replace")
    fast, slow = page.locator(".answer .text").all()
    assert fast.text_content() == slow.text_content() == expected
    expect(page.locator(".verdict")).to_contain_text("The same text with seed 0")
    # Two tokens in a call of the engine: a drafter's, and the target's own.
    assert page.locator(".answer").first.locator(".call").count() == 11
    assert page.locator(".answer").first.locator(".lookup").count() == 11
    assert page.locator(".answer").first.locator(".own").count() == 11
    counts = page.locator(".counts").first.text_content() or ""
    assert counts.startswith("22 tokens, ")
    assert counts.endswith("acceptance length 2.10, 11 target calls saved")


def test_an_answer_streams_and_escape_stops_it(page: Page, engine: FakeEngine) -> None:
    page.fill("#limit", "50000")
    page.fill("#question", "abc")
    page.keyboard.press("Enter")
    text = page.locator(".answer .text")
    expect(text).to_contain_text("abc")
    expect(text).to_have_text(re.compile(r"[abc\s]{40}"))
    page.keyboard.press("Escape")
    expect(page.locator(".verdict")).to_have_text("Stopped.")
    expect(page.locator("#question")).to_be_focused()
    wait_until(lambda: not engine.busy)


def test_what_is_typed_while_an_answer_comes_stays(page: Page) -> None:
    page.fill("#limit", "200")
    page.fill("#temperature", "")  # the server's default
    page.fill("#question", "abc")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .text")).to_contain_text("a")
    page.fill("#question", "next")
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#question")).to_have_value("next")


def test_a_refusal_is_shown(page: Page) -> None:
    page.fill("#temperature", "-1")
    page.fill("#question", "abc")
    page.keyboard.press("Enter")
    told = "temperature is -1.0; it must be 0 or more."
    expect(page.locator("#turns .fault")).to_have_text(told)


@pytest.mark.parametrize("width", [1100, 340])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    ask(page, "a" * 300, tokens=60, seed=0, compare=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("#question", "#send", "#compare", "#seed"):
        expect(page.locator(name)).to_be_in_viewport()
