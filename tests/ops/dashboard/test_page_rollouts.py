"""The page's viewer of rollouts: the list and its filters, the tree of turns, and tokens in every colour."""

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
JOB = rollouts.rows()[0]["job_id"]


def opened(page: Page, row: int = 0) -> None:
    """Show the rollout of a row of the list."""
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator("#rollouts-rows button").nth(row).click()
    page.locator(".token").first.wait_for()


def test_the_list_is_asked_for_once_it_is_in_sight(serve: Serve, visit: Visit) -> None:
    server = serve(states.quiet(4))
    page = visit(server.url)
    assert not any(path.startswith("/rollouts") for path in server.requests)
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator("#rollouts-rows tr").nth(49).wait_for()
    page.get_by_role("button", name="Older").click()
    page.locator("#rollouts-rows tr").nth(99).wait_for()
    assert page.locator("#rollouts-told").inner_text() == "newest 100, as of 12:00:00"


def test_the_list_is_filtered(serve: Serve, visit: Visit) -> None:
    server = serve(states.quiet(4))
    page = visit(server.url)
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator("#rollouts-rows tr").nth(49).wait_for()
    page.locator("#rollouts select").select_option("dropped")
    until(
        lambda: (
            set(page.locator("#rollouts-rows td:nth-child(3)").all_inner_texts()) == {"dropped: older than 4 versions"}
        )
    )
    page.locator("#rollouts [name=worker]").fill("nobody")
    page.keyboard.press("Enter")
    page.get_by_text("none that matches").wait_for()
    assert "limit=50&worker=nobody&outcome=dropped" in server.requests[-1]


def test_tokens_say_everything(serve: Serve, visit: Visit) -> None:
    page = visit(serve(states.quiet(4)).url)
    opened(page)
    facts = page.locator("#rollout .facts")
    page.locator(".token").nth(150).hover()
    for part in ("token 150", "version 48", "logprob −", "trained on", "leg 1", "a new request to an engine began"):
        assert part in facts.inner_text()
    page.locator(".token").nth(100).hover()
    assert "masked, not trained on" in facts.inner_text()
    page.mouse.move(0, 0)  # a token that comes below the pointer would be told
    page.locator(".tokens").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    assert facts.inner_text().startswith("token 0 ·")
    page.keyboard.press("End")
    assert facts.inner_text().startswith("token 419 ·")


@pytest.mark.parametrize("way", ["version", "logprob", "mask", "leg", "replay"])
def test_tokens_are_coloured_by_what_one_asks(serve: Serve, visit: Visit, way: str) -> None:
    """Tokens 20 and 200 differ in version and leg, 100 in its mask, and the replay differs from 180 on."""
    page = visit(serve(states.quiet(4)).url)
    opened(page)
    page.locator("#rollout").get_by_label(way, exact=True).check()
    back = page.evaluate("() => [...document.querySelectorAll('.token')].map((it) => it.style.backgroundColor)")
    same = {"version": back[20] != back[200], "leg": back[20] != back[200], "mask": back[20] != back[100]}
    same |= {"logprob": len(set(back)) > 20, "replay": back[20] == "" and back[200] != ""}
    assert same[way]
    assert page.locator(".swatch-text").count() >= 2


def test_tokens_are_ids_or_texts(serve: Serve, visit: Visit) -> None:
    page = visit(serve(states.quiet(4)).url)
    opened(page)
    tokens = rollouts.rollout(JOB)["tokens"]
    assert page.locator(".token").nth(11).inner_text() == str(tokens[11]["id"])
    page.get_by_label("as text").uncheck()
    assert page.locator(".token").nth(20).inner_text() == str(tokens[20]["id"])


def test_one_jumps_to_where_the_replay_differs(serve: Serve, visit: Visit) -> None:
    page = visit(serve(states.quiet(4)).url)
    opened(page)
    page.get_by_role("button", name="Go to token 180").click()
    assert page.evaluate("() => document.activeElement.dataset.index") == "180"
    assert page.locator("#rollout .facts").inner_text().startswith("token 180 ·")


def test_turns_are_a_tree(serve: Serve, visit: Visit) -> None:
    server = serve(states.quiet(4))
    page = visit(server.url)
    opened(page)
    turns = page.locator(".turns li")
    indents = [turn.evaluate("(it) => it.style.paddingInlineStart") for turn in turns.all()]
    assert indents == ["0rem", "1rem", "2rem", "3rem", "3rem", "3rem"]
    assert turns.nth(3).get_by_role("button").get_attribute("aria-current") == "true"
    turns.nth(1).get_by_role("button").click()
    until(lambda: server.requests[-1] == f"/rollout/{JOB}-t1?sample=0")


def test_a_long_rollout_is_drawn_in_parts(serve: Serve, visit: Visit) -> None:
    server = serve(states.quiet(4))
    server.rollouts[JOB] = rollouts.rollout(JOB, tokens=9000) | {
        "verdict": {"state": "differs", "text": "", "at": 8500}
    }
    page = visit(server.url)
    opened(page)
    assert page.locator(".token").count() == 4000
    page.get_by_role("button", name="Show 4,000 more of 5,000 tokens").click()
    assert page.locator(".token").count() == 8000
    page.get_by_role("button", name="Go to token 8,500").click()
    assert page.evaluate("() => document.activeElement.dataset.index") == "8500"


def test_a_job_that_is_gone_is_named(serve: Serve, visit: Visit) -> None:
    server = serve(states.faults())
    server.state["failures"][1]["jobs"] = ["gone"]
    page = visit(server.url, expected=("404",))
    page.locator("#failures-list summary").nth(1).click()
    page.get_by_role("button", name="gone").click()
    page.get_by_text("gone: there is no job 'gone'").wait_for()
