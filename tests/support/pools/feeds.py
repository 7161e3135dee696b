"""What the tests of a trainer's feed share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.specimens.messages import SHORT

from rolloutmq import GenerateJob, RolloutFeed


def prompts(count: int = 12, n: int = 2, start: int = 0, **fields: Any) -> Iterator[GenerateJob]:
    """The data: always the same prompts in the same order."""
    for i in range(start, count):
        yield GenerateJob(**{"token_ids": [7, i], "n": n, "sampling": SHORT, "metadata": {"place": i}} | fields)


def in_full(feed: RolloutFeed, trained: int, in_flight: int, **dropped: int) -> None:
    """The books add up, and say this."""
    feed.books.check()
    report = feed.report()
    assert (report["trained"], report["in_flight"], report["dropped"]) == (trained, in_flight, dropped)
