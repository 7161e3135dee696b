"""The page beside a live server: seconds that change it, a server that is silent or comes back, and requeues."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import states
from page_server import TOKEN, PageServer
from support.pools.operations import until

if TYPE_CHECKING:
    from playwright.sync_api import Page

Serve = Callable[..., PageServer]
Visit = Callable[..., "Page"]
BROKEN_OFF = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_EMPTY_RESPONSE")


def test_a_tick_changes_what_it_names(serve: Serve, visit: Visit) -> None:
    server = serve(states.quiet(4))
    page = visit(server.url)
    server.tick(
        {
            "patch": {
                "at": states.NOW + 1,
                "flow": {"queued": 77_123},
                "verdict": {"state": "starved", "title": "Workers wait for jobs"},
                "workers": {"gpu-00-0": None, "new": {"state": "serving", "version": 49, "alive": True}},
            },
            "points": {"queued": 77_123},
            "spans": {"new": [[states.NOW + 1, None, 49, "serving"]]},
            "ticks": {"new": [[states.NOW + 1, "join", 49, ""]]},
            "gone": ["gpu-00-0"],
        }
    )
    page.get_by_text("Workers wait for jobs").wait_for()
    assert page.locator("#tiles dd").nth(1).inner_text() == "77.1k"
    assert page.locator("#clock").inner_text().endswith("12:00:01")
    assert page.locator("#versions").inner_text().split("\n") == ["v49: 1", "v48: 3"]
    assert page.locator("#workers-told").inner_text() == "4 lanes · last 15 min"
    page.locator("#ribbon").focus()
    page.keyboard.press("PageDown")
    page.keyboard.press("PageDown")
    assert page.locator("#ribbon-facts").inner_text() == "new: 12:00:01 joined, version 49"


def test_one_hour_of_ticks_keeps_fifteen_minutes(serve: Serve, visit: Visit) -> None:
    """Lanes, series and measures are as long after an hour as before it; what has focus and is open stays so."""
    state = states.faults()
    server = serve(state)
    page = visit(server.url)
    page.locator("#failures-list summary").first.click()
    page.locator("#workers-filter").focus()
    made = states.ticks(state)
    for _ in range(3600):
        server.tick(next(made))
    page.get_by_text("13:00:00").wait_for()
    kept = page.evaluate("""async () => {
      const { page: it } = await import("./page/main.js");
      const lanes = Object.values(it.state.lanes);
      return [it.state.series.at.length, Math.max(...lanes.map((lane) => lane.ticks.length)),
              performance.getEntriesByName("update", "measure").length];
    }""")
    assert kept[0] <= 900 + 61
    assert kept[1] <= 900
    assert kept[2] <= 501
    assert page.locator("#failures-list details[open]").count() == 1
    assert page.evaluate("() => document.activeElement.id") == "workers-filter"


def test_a_server_that_is_gone_is_named_and_found_again(serve: Serve, visit: Visit) -> None:
    server = PageServer(states.quiet(4))
    with server.running():
        page = visit(server.url, expected=BROKEN_OFF)
        assert page.locator("#silence").inner_text() == ""
    page.get_by_text("The dashboard's server is silent since").wait_for()
    assert "not connected" in page.locator("#clock").inner_text()
    server.state["verdict"] = {"state": "idle", "since": states.NOW, "title": "Nobody asks for anything"}
    with server.running():
        page.get_by_text("Nobody asks for anything").wait_for()
        until(lambda: page.locator("#silence").inner_text() == "")
        page.close()


def test_a_server_that_hangs_is_named(serve: Serve, visit: Visit) -> None:
    """The connection is there, and no tick comes over it."""
    server = serve(states.quiet(4))
    page = visit(server.url)
    page.get_by_text("The dashboard's server is silent since").wait_for()
    server.tick({"patch": {"at": states.NOW + 9}})
    until(lambda: page.locator("#silence").inner_text() == "")


def test_a_silent_redis_is_named(serve: Serve, visit: Visit) -> None:
    server = serve(states.quiet(4) | {"silent_s": 12.4})
    page = visit(server.url)
    assert "Redis has not answered for 12 s, since 11:59:47." in page.locator("#silence").inner_text()
    server.tick({"patch": {"silent_s": 0}})
    until(lambda: page.locator("#silence").inner_text() == "")


def test_a_server_that_comes_later_is_found(serve: Serve, visit: Visit) -> None:
    """The page is there, and its first question is answered with an error."""
    server = serve(states.quiet(4))
    state, server.state = server.state, {}
    del server.state
    page = visit(server.url, wait=False, expected=("500",))
    page.get_by_text("The server answered 500. This page asks again.").wait_for()
    server.state = state
    page.get_by_text("Workers and trainer keep pace").wait_for()
    until(lambda: page.locator("#silence").inner_text() == "")


def test_a_group_is_requeued_with_a_token(serve: Serve, visit: Visit) -> None:
    """Asked for once, kept for the tab alone, and asked for again after it was wrong."""
    server = serve(states.faults())
    page = visit(server.url, expected=("401",))
    group = page.locator("#failures-list li", has_text="segmentation fault")
    said = page.locator("#failures-said")
    for token, told in (("wrong", "Nothing was requeued. the token is another one"), (TOKEN, "180 jobs queued again")):
        group.get_by_role("button", name="Requeue").click()
        page.get_by_label("Token", exact=True).fill(token)
        page.get_by_role("dialog").get_by_role("button", name="Requeue").click()
        until(lambda told=told: said.inner_text().startswith(told))
    group.get_by_role("button", name="Requeue").click()
    until(lambda: len(server.requeued) == 2)
    assert set(server.requeued) == {server.state["failures"][1]["id"]}
    assert json.loads(page.evaluate("() => JSON.stringify([Object.values(sessionStorage), localStorage.length])")) == [
        [TOKEN],
        0,
    ]
    assert page.locator("#failures-list li").first.get_by_role("button", name="Requeue").count() == 0


def test_who_has_second_thoughts_requeues_nothing(serve: Serve, visit: Visit) -> None:
    server = serve(states.faults())
    page = visit(server.url)
    page.locator("#failures-list").get_by_role("button", name="Requeue").first.click()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")
    assert not any(path.startswith("/requeue") for path in server.requests)


def test_without_a_token_there_are_no_buttons(serve: Serve, visit: Visit) -> None:
    page = visit(serve(states.faults() | {"can_act": False}).url)
    assert page.locator("#failures-list").get_by_role("button", name="Requeue").count() == 0
    assert "read-only" in page.locator("#failures-told").inner_text()
