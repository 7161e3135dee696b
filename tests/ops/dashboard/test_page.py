"""What the page shows of a state: its words, its colours, on a desk and on a phone; without an error in the console."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import rollouts
import states
from page_server import PageServer
from support.pools.operations import until

if TYPE_CHECKING:
    from playwright.sync_api import Page

Serve = Callable[..., PageServer]
Visit = Callable[..., "Page"]
WIDTHS = (390, 1440)
SCHEMES = ("light", "dark")
STATES = {"quiet": states.quiet, "faults": states.faults, "hostile": states.hostile}


def texts(page: Page, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def colours(page: Page, left: float, top: float) -> list[int]:
    """The pixel of the ribbon at these shares of its width and height."""
    return page.evaluate(
        """([left, top]) => {
          const canvas = document.getElementById("ribbon");
          return [...canvas.getContext("2d").getImageData(left * canvas.width, top * canvas.height, 1, 1).data];
        }""",
        [left, top],
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", STATES)
def test_nobody_is_shut_out(serve: Serve, visit: Visit, name: str, width: int, scheme: str) -> None:
    """No violation that axe finds, with everything open, and no sideways scrolling of the page."""
    from axe_playwright_python.base import AXE_SCRIPT  # noqa: PLC0415  # a big text

    server = serve(STATES[name]())
    page = visit(server.url, width=width, scheme=scheme)
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator("#rollouts-rows button").first.click()
    page.locator(".token").first.wait_for()
    page.evaluate("() => document.querySelectorAll('details').forEach((it) => { it.open = true; })")
    page.evaluate(AXE_SCRIPT)
    found = page.evaluate("() => axe.run({ resultTypes: ['violations'] })")["violations"]
    assert [(it["id"], [node["html"] for node in it["nodes"]]) for it in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_verdict_says_why_and_what_to_do(serve: Serve, visit: Visit) -> None:
    state = states.faults()
    server = serve(state)
    page = visit(server.url)
    assert page.locator("#verdict-state").inner_text() == "✕ broken"
    assert page.locator("#verdict-title").inner_text() == state["verdict"]["title"]
    assert "(1 min 35 s)" in page.locator("#verdict-since").inner_text()
    assert texts(page, "#verdict-why li") == state["verdict"]["why"]
    assert texts(page, "#verdict-todo li") == state["verdict"]["todo"]
    assert "broken" in page.title()


def test_every_figure_says_its_scope(serve: Serve, visit: Visit) -> None:
    server = serve(states.faults())
    page = visit(server.url)
    scopes = ("now", "last 15 min", "since start", "newest 48 versions")
    figures = texts(page, "#tiles dt") + texts(page, "figcaption .scope") + texts(page, ".head .weak:not([role])")
    assert len(figures) >= 8 + 6
    assert [it for it in figures if not any(scope in it for scope in scopes)] == []


def test_a_lane_has_the_colour_of_what_it_served(serve: Serve, visit: Visit) -> None:
    """Version 48 is served at the end by all: its colour is at the right end of each lane, and in the legend."""
    server = serve(states.quiet(4))
    page = visit(server.url, expected=("willReadFrequently",))
    assert texts(page, "#versions .key") == ["v48: 4"]
    swatch = page.evaluate("() => getComputedStyle(document.querySelector('#versions .swatch')).backgroundColor")
    red, green, blue, _ = colours(page, 0.99, 0.06)
    assert swatch == f"rgb({red}, {green}, {blue})"
    assert colours(page, 0.5, 0.06) != [red, green, blue, 255]


def test_the_ribbon_is_read_by_keyboard(serve: Serve, visit: Visit) -> None:
    server = serve(states.faults())
    page = visit(server.url)
    facts = page.locator("#ribbon-facts")
    page.locator("#ribbon").focus()
    for _ in range(12):
        page.keyboard.press("ArrowDown")
    assert facts.inner_text().startswith("gpu-01-3: 11:59:42 died, version 47, exit status 139")
    page.keyboard.press("ArrowLeft")
    assert "version 47, serving" in facts.inner_text() or "dead" in facts.inner_text()
    page.keyboard.press("Home")
    assert "11:45:00" in facts.inner_text()


def test_the_ribbon_says_what_is_pointed_at(serve: Serve, visit: Visit) -> None:
    server = serve(states.quiet(4))
    page = visit(server.url)
    box = page.locator("#ribbon").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 30)
    assert page.locator("#ribbon-facts").inner_text().startswith("gpu-00-1: version 48, serving, 11:5")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] + 300)
    assert "Point at a lane" in page.locator("#ribbon-facts").inner_text()


def test_lanes_and_figures_lead_to_their_rollouts(serve: Serve, visit: Visit) -> None:
    server = serve(states.quiet(4))
    page = visit(server.url)
    page.locator("#ribbon").click(position={"x": 400, "y": 30})
    until(lambda: "/rollouts?limit=50&worker=gpu-00-1" in server.requests)
    page.mouse.move(0, 0)
    page.locator("#ribbon").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    assert page.locator("#rollouts [name=worker]").input_value() == "gpu-00-0"
    page.get_by_title("List them").first.click()
    until(lambda: server.requests[-1] == "/rollouts?limit=50&outcome=waiting")
    assert page.locator("#rollouts [name=worker]").input_value() == ""


@pytest.mark.parametrize("width", WIDTHS)
def test_the_navigation_arrives_though_parts_grow_on_the_way(serve: Serve, visit: Visit, width: int) -> None:
    page = visit(serve(states.faults()).url, width=width)
    page.get_by_role("link", name="Alarms").click()
    page.locator("#rollouts-rows tr").nth(49).wait_for()
    bottom = "document.documentElement.scrollHeight - innerHeight - scrollY"
    top = "document.getElementById('alarms').getBoundingClientRect().top"
    until(lambda: page.evaluate(bottom) < 2 or 0 <= page.evaluate(top) < 120)


def test_lanes_are_filtered(serve: Serve, visit: Visit) -> None:
    server = serve(states.faults())
    page = visit(server.url)
    told = page.locator("#workers-told")
    assert told.inner_text() == "16 lanes · last 15 min"
    page.locator("#workers-filter").fill("gpu-01 v46")
    until(lambda: told.inner_text() == "1 lanes, 15 filtered out · last 15 min")
    page.locator("#workers-filter").fill("")
    page.get_by_label("only with trouble").check()
    until(lambda: told.inner_text() == "4 lanes, 12 filtered out · last 15 min")
    page.locator("#workers-all summary").click()
    until(lambda: texts(page, "#workers-rows tr:first-child > *")[:3] == ["gpu-01-3", "dead (dead)", "48"])


def test_a_thousand_lanes_are_scrolled(serve: Serve, visit: Visit) -> None:
    server = serve(states.large())
    page = visit(server.url)
    page.locator("#ribbon").focus()
    for _ in range(60):
        page.keyboard.press("PageDown")
    assert page.locator("#ribbon-facts").inner_text().startswith("gpu-124-7: ")
    assert page.evaluate("() => document.getElementById('lanes').scrollTop") > 5000
    assert page.locator("#failures-list li").count() == 20
    page.get_by_role("button", name="Show 180 more groups").click()
    assert page.locator("#failures-list li").count() == 200


def test_charts_are_read_by_keyboard(serve: Serve, visit: Visit) -> None:
    server = serve(states.faults())
    page = visit(server.url)
    chart = page.locator("figure.chart", has_text="Reward by version")
    chart.locator("canvas").focus()
    page.keyboard.press("ArrowLeft")
    assert chart.locator(".readout").inner_text().startswith("v47 −0.3")
    page.keyboard.press("Home")
    assert chart.locator(".readout").inner_text().startswith("v1 ")
    assert "Arrow keys" in (chart.locator("canvas").get_attribute("aria-label") or "")


def test_texts_stay_texts(serve: Serve, visit: Visit) -> None:
    """Ids, causes and tokens with HTML, control characters and names of prototypes are shown, not done."""
    server = serve(states.hostile())
    server.rollouts["hostile"] = rollouts.rollout("hostile")
    server.rows[0]["job_id"] = "hostile"
    server.rows[1]["job_id"] = states.HOSTILE[0]
    page = visit(server.url)
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator("#rollouts-rows button").first.click()
    page.locator(".token").first.wait_for()
    page.locator("#workers-all summary").click()
    assert page.evaluate("() => window.broken") is None
    assert page.locator("main img, main script").count() == 0
    assert "⟨U+202E⟩gnp.exe⟨U+0000⟩⟨U+001B⟩[31m" in page.locator("#pool").inner_text()
    assert {"__proto__", states.HOSTILE[0]} <= set(texts(page, "#workers-rows th"))
    assert page.locator("#failures-list li").count() == len(states.HOSTILE)
