"""A real Chromium for tests of the page, one for each module, and pages in it that must log no error."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from page_server import PageServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")  # while it is open no other loop can run on this thread, as tests of other modules do
def browser() -> Iterator[Browser]:
    """Debian's Chromium. Without one the tests are skipped; CI installs it, and says so where it cannot."""
    if CHROMIUM is None:
        pytest.skip("Debian's package chromium is not installed")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # a second, which other tests do not need

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., PageServer]]:
    """Serve a state, and frames of a journal's, until the test ends."""
    with ExitStack() as running:
        yield lambda *given: running.enter_context(PageServer(*given).running())


@pytest.fixture
def visit(browser: Browser, serve: object) -> Iterator[Callable[..., Page]]:
    """Open an address and wait until its state is drawn. The test fails if the page logged an error.

    Pages are closed before the servers of `serve` are.

    expected: texts of errors that are part of the test, such as that the server does not answer.
    """
    opened: list[tuple[Page, list[str], tuple[str, ...]]] = []

    def visited(
        url: str, *, width: int = 1440, scheme: Any = "light", expected: tuple[str, ...] = (), wait: bool = True
    ) -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, timezone_id="UTC")
        errors: list[str] = []
        opened.append((page, errors, expected))
        page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        if wait:
            page.locator("#verdict-state:not(:empty)").wait_for()
        return page

    yield visited
    for page, errors, expected in opened:
        page.close()
        assert [error for error in errors if not any(text in error for text in expected)] == []
