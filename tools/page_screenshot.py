r"""Takes a screenshot of a running server's page: one question, with and without a drafter.

    python -m redrafter_jax serve --drafter configs/smollm2_135m/drafter --adaptive off \
        --beam-width 1 --draft-rounds 2 --num-nodes 4 --rerank --name SmolLM2-135M-Instruct
    python -m tools.page_screenshot http://127.0.0.1:8000 docs/serving.png
    python -m tools.page_screenshot http://127.0.0.1:8000 docs/pictures/page-narrow.png \
        --width 360 --theme dark

This needs an installed Chromium, such as Debian's. Pictures have few colours, to keep files small.
"""

import argparse
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from redrafter_jax.command_line import run
from redrafter_jax.errors import InputError

_COLOURS = 64
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def browser_page(width: int = 1100) -> Generator[Page]:
    """Open a page of this width, in pixels, in headless Chromium.

    Raises:
      InputError: no Chromium is installed.
    """
    path = chromium()
    if path is None:
        raise InputError(
            f"The picture needs a browser, but none of {', '.join(_NAMES)} is installed; install "
            "one of them."
        )
    with sync_playwright() as playwright:
        # The sandbox does not work for root, the usual user in containers.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": width, "height": 760})
        browser.close()


def set_up(page: Page, *, tokens: int, seed: int, compare: bool) -> None:
    """Fill in the page's settings."""
    page.click("#open-settings")
    page.fill("#limit", str(tokens))
    page.fill("#temperature", "0.7")
    page.fill("#seed", str(seed))
    page.set_checked("#compare", compare)
    page.click("#close-settings")


def ask(page: Page, question: str) -> None:
    """Ask a question and wait for the complete answer."""
    page.fill("#question", question)
    page.press("#question", "Enter")
    wait(page)


def wait(page: Page) -> None:
    """Wait until the answer is complete."""
    page.wait_for_selector("#turns[aria-busy=false]", timeout=120_000)


def main() -> None:
    """Take the screenshot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--question", default="Name three uses of a paper clip.")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    arguments = parser.parse_args()
    with browser_page(arguments.width) as page:
        page.emulate_media(color_scheme=arguments.theme)
        page.goto(arguments.url)
        page.wait_for_selector("#model:not(:text('connecting'))")
        set_up(page, tokens=160, seed=1, compare=arguments.width > 800)
        ask(page, arguments.question)
        page.screenshot(path=arguments.picture)
    with Image.open(arguments.picture) as picture:
        small = picture.convert("RGB").quantize(_COLOURS)
    small.save(arguments.picture, optimize=True)


if __name__ == "__main__":
    run(main)
