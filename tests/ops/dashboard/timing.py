"""How long the page takes, by its own measures in the browser: from the address to the first paint, and for a second's
changes until they are drawn."""

from __future__ import annotations

from statistics import quantiles
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page


def drawn(page: Page) -> int:
    """How many updates the page has drawn, the first one included."""
    return int(page.evaluate("() => performance.getEntriesByName('update', 'measure').length"))


def timings(page: Page) -> dict[str, Any]:
    """Of a page that drew at least three updates: {"first_paint_ms", "update_ms": {"p50", "p95", "most"}, "updates"}.

    An update is from the arrival of a tick, before it is parsed, until layout and paint of the frame that shows it are
    done. The first state is no update.
    """
    first, taken = page.evaluate(
        """() => ["first-paint", "update"].map((name) =>
             performance.getEntriesByName(name, "measure").map((it) => it.duration))"""
    )
    parts = quantiles(taken[1:], n=20, method="inclusive")
    update = {"p50": round(parts[9], 1), "p95": round(parts[18], 1), "most": round(max(taken[1:]), 1)}
    return {"first_paint_ms": round(first[0], 1), "update_ms": update, "updates": len(taken) - 1}
