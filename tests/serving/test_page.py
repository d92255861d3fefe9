"""The page in a Chromium without a window: asked, streamed, stopped, tried again, and kept."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from playwright.sync_api import Page, Request, expect
from servers import LINES, ROOMY, serving, wait_until

from redrafter_jax.text.chat_template import NO_TEMPLATE, ChatTemplate
from tools.page_screenshot import ask, browser_page, chromium, set_up, wait

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed"),
]

# Milliseconds; the machine may be slow.
expect.set_options(timeout=120_000)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(slots=2, seconds=0.02)


@pytest.fixture
def template() -> ChatTemplate:
    return LINES


both_routes = pytest.mark.parametrize("template", [LINES, NO_TEMPLATE], ids=["chat", "text"])


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


def setting(page: Page, name: str, value: str | bool) -> None:
    """Change one field of the drawer."""
    page.click("#open-settings")
    if isinstance(value, bool):
        page.set_checked(f"#{name}", value)
    elif name == "theme":
        page.select_option(f"#{name}", value)
    else:
        page.fill(f"#{name}", value)
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).not_to_be_visible()


def messages_of(asked: Request) -> list[dict[str, str]]:
    """The conversation that a request holds."""
    body: Any = asked.post_data_json
    return body["messages"]


@both_routes
def test_the_same_text_comes_with_and_without_speculation(
    page: Page, template: ChatTemplate
) -> None:
    set_up(page, tokens=22, seed=0, compare=True)
    setting(page, "written", True)
    ask(page, "héllo <b>")
    end = "\n" if template is LINES else ""
    expected = ((f"héllo <b>{end}") * 3).encode()[:22].decode(errors="replace")
    fast, slow = page.locator(".answer .text").all()
    assert fast.text_content() == slow.text_content() == expected
    expect(page.locator(".verdict")).to_contain_text("The same text with seed 0")
    # Two tokens in a call of the engine: a drafter's, and the target's own.
    answer = page.locator(".answer").first
    # The first byte of an é has no text yet.
    assert answer.locator(".token").count() == 20
    assert answer.locator(".token.lookup").count() == (10 if template is LINES else 11)
    assert answer.locator("rect").count() == 10
    assert answer.locator("rect.gain").count() == 10
    counts = page.locator(".counts").first.text_content() or ""
    assert counts.startswith("22 tokens, ")
    assert counts.endswith("2.10 tokens per target call, 11 calls saved")


def test_an_answer_streams_and_escape_stops_it_and_the_talk_goes_on(
    page: Page, engine: FakeEngine
) -> None:
    set_up(page, tokens=50_000, seed=0, compare=False)
    page.fill("#question", "abc")
    page.keyboard.press("Enter")
    text = page.locator(".answer .text")
    expect(text).to_have_text(re.compile(r"[abc\s]{40}"))
    page.keyboard.press("Escape")
    expect(page.locator(".verdict")).to_have_text("Stopped.")
    expect(page.locator("#question")).to_be_focused()
    wait_until(lambda: not engine.busy)
    setting(page, "limit", "8")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "more")
    first, said, more = messages_of(asked.value)
    assert (first["content"], more["content"]) == ("abc", "more")
    assert said["content"].startswith("abc")


def test_the_system_prompt_goes_first(page: Page) -> None:
    setting(page, "system", "Be brief.")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "abc")
    assert messages_of(asked.value)[0] == {"role": "system", "content": "Be brief."}


def test_the_last_message_is_tried_again_with_the_next_seed(page: Page) -> None:
    set_up(page, tokens=4, seed=0, compare=False)
    ask(page, "abcd")
    assert page.locator(".answer .text").inner_text() == "abcd"
    page.get_by_text("Try again").click()
    expect(page.locator(".answer .text")).to_have_text("bcd")
    assert page.locator("article").count() == 1


def test_the_last_message_is_edited(page: Page) -> None:
    set_up(page, tokens=4, seed=0, compare=False)
    ask(page, "abcd")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#editing")).to_be_visible()
    expect(page.locator("#question")).to_have_value("abcd")
    page.keyboard.press("Escape")
    expect(page.locator("#editing")).not_to_be_visible()
    page.get_by_text("Edit", exact=True).click()
    ask(page, "wxyz")
    assert page.locator(".question").all_inner_texts() == ["wxyz"]
    expect(page.locator(".answer .text")).to_have_text("wxyz")


def test_a_conversation_stays_until_a_new_one_begins(page: Page) -> None:
    set_up(page, tokens=4, seed=0, compare=True)
    ask(page, "abcd")
    setting(page, "theme", "dark")
    before = page.locator("#turns").inner_text()
    page.reload()
    expect(page.locator("#model")).to_contain_text("tiny")
    assert page.locator("#turns").inner_text() == before
    assert page.locator(".token").count() == 8
    assert page.evaluate("document.documentElement.style.colorScheme") == "dark"
    page.click("#reset")
    page.reload()
    assert page.locator("article").count() == 0
    expect(page.locator(".welcome")).to_be_visible()


BROKEN = {
    "no JSON": "{",
    "no object": "5",
    "another form": '{"settings": {"limit": "7"}, "turns": [{"question": "old"}]}',
    "no answer": '{"form": 1, "turns": [{"question": "a", "seed": 0}]}',
    "no tokens": '{"form": 1, "turns": [{"question": "a", "answer": {"text": "b", "shown": "b"}}]}',
    "no turns": '{"form": 1, "turns": 3}',
}


@pytest.mark.parametrize("record", BROKEN.values(), ids=BROKEN)
def test_a_record_that_cannot_be_read_is_as_none(page: Page, record: str) -> None:
    page.evaluate("record => localStorage.setItem('redrafter', record)", record)
    page.reload()
    expect(page.locator("#model")).to_contain_text("tiny")
    expect(page.locator(".welcome")).to_be_visible()
    assert page.locator("article").count() == 0
    set_up(page, tokens=4, seed=0, compare=False)
    ask(page, "abcd")
    page.reload()
    expect(page.locator(".answer .text")).to_have_text("abcd")


def test_nothing_secret_is_kept(page: Page) -> None:
    setting(page, "key", "secret")
    ask(page, "abcd")
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_colours_can_be_switched_off(page: Page) -> None:
    ask(page, "abcd")
    assert page.locator(".token").count()
    setting(page, "colours", False)
    assert page.locator(".token").count() == 0
    expect(page.locator(".legend")).not_to_be_visible()


def test_an_answer_and_its_code_are_copied_as_written(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    set_up(page, tokens=22, seed=0, compare=False)
    page.fill("#question", "```py\nx = 1\n```\n**b**")
    page.keyboard.press("Enter")
    wait(page)
    pasted = "navigator.clipboard.readText()"
    page.locator(".answer > header .copy").click()
    expect(page.get_by_text("Copied")).to_be_visible()
    assert page.evaluate(pasted) == "```py\nx = 1\n```\n**b**\n"
    page.locator("figure .copy").click()
    expect(page.get_by_text("Copied")).to_have_count(2)
    assert page.evaluate(pasted) == "x = 1"


def test_what_is_typed_while_an_answer_comes_stays(page: Page) -> None:
    setting(page, "limit", "200")
    setting(page, "temperature", "")  # the server's default
    page.fill("#question", "abc")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .text")).to_contain_text("a")
    page.fill("#question", "next")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#question")).to_have_value("next")


def test_a_refusal_is_shown_and_the_message_can_be_mended(page: Page) -> None:
    ask(page, "abcd")
    setting(page, "temperature", "-1")
    ask(page, "efgh")
    told = "temperature is -1.0; it must be 0 or more."
    expect(page.locator("#turns .fault")).to_have_text(told)
    expect(page.locator("#question")).to_have_value("efgh")
    assert page.locator(".question").all_inner_texts() == ["abcd"]
    # A second try that is refused leaves the answer that was there.
    page.get_by_text("Try again").click()
    expect(page.locator("#turns .fault")).to_have_text(told)
    assert page.locator(".question").all_inner_texts() == ["abcd"]


@pytest.mark.parametrize("width", [1100, 360])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    set_up(page, tokens=60, seed=0, compare=True)
    ask(page, "a" * 300)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("#question", "#send", "#open-settings", "#reset"):
        expect(page.locator(name)).to_be_in_viewport()
    page.click("#open-settings")
    for name in ("#system", "#compare", "#seed", "#close-settings"):
        expect(page.locator(name)).to_be_in_viewport()


def test_all_can_be_reached_by_the_keyboard(page: Page) -> None:
    ask(page, "abcd")
    reached = set[str]()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent"))
    assert {"New", "Settings", "Send", "Copy", "Try again", "Edit"} <= reached
