"""How many functions a job and a version pass, by a trace; `budget.toml` holds their numbers.

`PYTHONPATH=.venv/src python -m pytest -s tests/house/test_walk.py` prints them in the order in which they are called.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest
from house.test_budget import FLOORS, SPARE, WALK
from support.peers.publishing import WEIGHTS, publisher
from support.pools.pool import worker
from support.specimens.messages import SHORT

from rolloutmq import RolloutClient

ROUNDS = 15
"""A function belongs to the walk if most of so many passes call it: what a timer calls does not."""
Called = dict[CodeType, None]


class Trace:
    """What is called in this thread and in those that begin from now on, in the order of the first calls."""

    def __init__(self) -> None:
        self.called: Called = {}

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self.called.setdefault(frame.f_code)

    def anew(self) -> Called:
        """What is called from now on."""
        self.called = {}
        return self.called


@pytest.fixture
def trace() -> Iterator[Trace]:
    """Asked for before whatever starts threads."""
    made = Trace()
    threading.setprofile(made.note)
    sys.setprofile(made.note)
    yield made
    sys.setprofile(None)
    threading.setprofile(None)


def place(code: CodeType) -> str | None:
    """The function's file in the package and its name; None for what is of no floor, and for comprehensions."""
    parts = Path(code.co_filename).parts
    floor = next((i for i, part in enumerate(parts) if part in FLOORS and "site-packages" not in parts), None)
    if floor is None or code.co_name.startswith("<"):
        return None
    return f"{'/'.join(parts[floor:])} {code.co_qualname}"


async def walk(trace: Trace, pass_once: Callable[[], Awaitable[object]]) -> list[str]:
    """The functions that most passes call."""
    await pass_once()
    passes: list[Called] = []
    for _ in range(ROUNDS):
        passes.append(trace.anew())
        await pass_once()
    trace.anew()
    count = Counter(code for called in passes for code in called)
    return [name for code, times in count.items() if times > ROUNDS / 2 and (name := place(code))]


def check(name: str, walked: list[str]) -> None:
    rooms = [function.split()[0].rpartition("/")[0] for function in walked]
    print(f"\n{name}: {len(walked)} functions in {len(set(rooms))} rooms", *walked, sep="\n  ")
    assert len(walked) <= WALK[name], "more needs a commit of its own that says who gains"
    assert len(walked) >= WALK[name] * (1 - 2 * SPARE), "lower it to what there is"


@pytest.mark.one_shard
async def test_what_a_job_passes(trace: Trace, redis_db: str) -> None:
    async with worker(redis_db), RolloutClient(redis_db) as client:

        async def job() -> None:
            await client.wait(await client.submit(token_ids=[1, 2, 3], sampling=SHORT), 30)

        check("job", await walk(trace, job))


@pytest.mark.one_shard
async def test_what_a_version_passes(trace: Trace, redis_db: str) -> None:
    async with worker(redis_db), publisher(redis_db) as source:

        async def version() -> None:
            handle = source.publish(source.last_version + 1, WEIGHTS.items())
            assert (await asyncio.to_thread(handle.wait, 60)).state == "committed"

        check("version", await walk(trace, version))
