"""1,000 workers and 100,000 jobs: what the page takes for them is printed; tests on busy machines assert no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import states
from page_server import PageServer
from support.pools.operations import until
from timing import drawn, timings

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_a_large_pool_is_drawn(serve: Callable[..., PageServer], visit: Callable[..., Page]) -> None:
    """Every tick changes figures of every worker, and 50 lanes."""
    state = states.large()
    server = serve(state)
    page = visit(server.url)
    made = states.ticks(state)
    until(lambda: drawn(page) == 1)
    for second in range(20):
        server.tick(next(made))
        until(lambda second=second: drawn(page) == second + 2)
    print(timings(page))
    assert page.locator("#workers-told").inner_text() == "1,000 lanes · last 15 min"
