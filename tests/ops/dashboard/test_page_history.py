"""The page of a finished run: with a slider over its server, as one file without a network, with a replay's report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import rollouts
import states
from page_server import PageServer, exported
from support.pools.operations import until

if TYPE_CHECKING:
    from playwright.sync_api import Page

Serve = Callable[..., PageServer]
Visit = Callable[..., "Page"]

BEFORE = "Workers and trainer keep pace"


def slide(page: Page) -> None:
    """Go back in time by keyboard, and to the end again."""
    title, slider = page.locator("#verdict-title"), page.locator("#history-at")
    assert "cannot be loaded" in title.inner_text()
    assert "a finished run" in page.locator("#clock").inner_text()
    slider.focus()
    page.keyboard.press("Home")
    until(lambda: title.inner_text() == BEFORE)
    assert page.locator("#clock").inner_text().endswith("2026-11-28 06:00:00")
    assert slider.get_attribute("aria-valuetext") == "2026-11-28 06:00:00"
    assert page.locator("#tiles dd").nth(5).inner_text() == "0"
    assert page.locator("#workers-told").inner_text() == "16 lanes · whole run"
    for _ in range(10):
        page.keyboard.press("PageUp")
    until(lambda: "cannot be loaded" in title.inner_text())
    page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="End").click()
    until(lambda: page.locator("#tiles dd").nth(5).inner_text() == "48,210")


def test_a_journal_is_slid_through(serve: Serve, visit: Visit) -> None:
    end, frames = states.finished()
    server = serve(end, frames)
    slide(visit(server.url))
    assert not any(path.startswith("/events") for path in server.requests)
    assert sum("brief" not in path for path in server.requests if path.startswith("/state")) == 1


def test_the_list_of_a_journal_ends_at_the_slider(serve: Serve, visit: Visit) -> None:
    end, frames = states.finished()
    server = serve(end, frames)
    page = visit(server.url)
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator("#rollouts-rows tr").nth(49).wait_for()
    page.locator("#history-at").focus()
    page.keyboard.press("ArrowLeft")
    until(lambda: "before=" in server.requests[-1])
    assert states.NOW - 30 < float(server.requests[-1].partition("before=")[2]) < states.NOW


def test_a_time_that_the_server_does_not_know_is_named(serve: Serve, visit: Visit) -> None:
    end, _ = states.finished()
    server = serve(end)
    page = visit(server.url, expected=("500",))
    server.frames = [{}]
    page.locator("#history-at").focus()
    page.keyboard.press("Home")
    page.get_by_text("The server answered 500.").wait_for()


def run() -> dict[str, object]:
    end, frames = states.finished()
    rows = rollouts.rows()
    found = [rollouts.rollout(row["job_id"], row["sample"]) for row in rows[:3]]
    return {"frames": frames, "state": end, "rows": rows, "rollouts": found}


@pytest.fixture
def as_file(tmp_path: Path) -> Callable[[dict[str, object]], str]:
    def written(given: dict[str, object]) -> str:
        (tmp_path / "run.html").write_text(exported(given))
        return (tmp_path / "run.html").as_uri()

    return written


def test_a_file_is_the_same_page(as_file: Callable[..., str], visit: Visit) -> None:
    page = visit(as_file(run()))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    slide(page)
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator("#rollouts-rows button").nth(2).click()
    page.locator(".token").first.wait_for()
    page.get_by_role("button", name="Older").click()
    assert page.locator("#rollouts-rows tr").count() == 100
    page.locator("#rollouts-rows button").nth(7).click()
    page.get_by_text("This file has the tokens of other samples only.").wait_for()
    assert requests == []


def test_a_file_with_hostile_texts_is_a_page(as_file: Callable[..., str], visit: Visit) -> None:
    page = visit(as_file({"frames": [], "state": states.hostile() | {"mode": "journal"}, "rows": [], "rollouts": []}))
    assert page.evaluate("() => window.broken") is None
    assert page.locator("#failures-list li").count() == len(states.HOSTILE)


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_a_replays_report_is_part_of_it(as_file: Callable[..., str], visit: Visit, width: int, scheme: str) -> None:
    """Also alone: a replay of a few samples has no run around it."""
    from axe_playwright_python.base import AXE_SCRIPT  # noqa: PLC0415  # a big text

    page = visit(as_file({"replay": rollouts.replay()}), wait=False, width=width, scheme=scheme)
    page.get_by_text("7 of 40 samples differ, 2 could not be verified").wait_for()
    assert page.locator("#replay-body tr.bad th, #replay-body tr.bad td").first.inner_text() == "sglang"
    assert "28 better ones are not listed" in page.locator("#replay-body").inner_text()
    page.get_by_role("button", name="0199f3c2-0001.0").click()
    assert page.locator(".token.other").count() == 2
    page.get_by_role("button", name="Go to token 12").click()
    assert 'the replay has 8 " an"' in page.locator("#rollout .facts").inner_text()
    assert page.locator("#verdict").is_hidden()
    page.evaluate(AXE_SCRIPT)
    found = page.evaluate("() => axe.run({ resultTypes: ['violations'] })")["violations"]
    assert [(it["id"], [node["html"] for node in it["nodes"]]) for it in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
