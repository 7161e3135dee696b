"""What `top` draws fits into any screen, whatever a pool has; and keys that come in pieces are keys."""

from __future__ import annotations

import asyncio
import os
import pty
import time
from collections import deque
from typing import Any

import pytest
from rich.cells import cell_len
from support.pools.pool import eventually, status

from rolloutmq.messages.ids import new_id
from rolloutmq.ops.journal import Live
from rolloutmq.ops.top.history import History, curve
from rolloutmq.ops.top.keys import Keyboard
from rolloutmq.ops.top.lines import lasting, nbytes, short
from rolloutmq.ops.top.reader import Focus, JobLine, Look
from rolloutmq.ops.top.views import JobsView, JobView, PoolView, View

HOSTILE = "\x1b[2J節点\u202e\n" * 20
ANY = Focus()
SIZES = [(80, 24), (40, 10), (20, 6), (1, 2), (300, 100), (79, 1)]


def look(workers: int = 3, focus: Focus = ANY, **state: Any) -> Look:
    fields: dict[str, Any] = {"host": HOSTILE, "engine": HOSTILE, "model": HOSTILE, "started_at": 1.0, "held": 10**12}
    some = [
        status(f"w{number}", **fields).model_dump() | {"alive": number > 0, "share": 1.0} for number in range(workers)
    ]
    ids = [new_id() for _ in range(30)]
    record = dict.fromkeys(("state", "client", "group"), HOSTILE)
    numbers = dict.fromkeys(("age_s", "samples", "done", "attempt", "lost"), 10**15)
    jobs = {it: JobLine(id=it, **record, **numbers) for it in ids}
    live = Live(ids[0], HOSTILE, facts={"client": HOSTILE, "accepted_at": 1.0, "attempt": 10**15}, problem=HOSTILE)
    whole: dict[str, Any] = {
        "pool": "default",
        "queued": {"high": 0, "normal": 10**9, "low": 1},
        "suspects": 2,
        "open_jobs": 10**10,
        "unread_bytes": 1 << 40,
        "set_aside": 3,
        "ended": {"done": 5},
        "committed_version": 12,
        "transfer_under_way": 4,
        "waiting_for_weights": ["a"],
        "imbalance": 1e9,
        "update_share": 1.0,
        "reasons": [{"cause": "weights-lost", "told": "weights-lost: nobody has version 12"}],
        "workers": some,
        "dead_letters_kept": 9,
    }
    return Look(time.monotonic(), whole | state, focus, 2, ids, jobs, live)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("workers", [0, 3, 200])
def test_every_view_fits(width: int, height: int, workers: int) -> None:
    seen, history = look(workers), History()
    history.add(seen)
    listed = look(workers, Focus(worker=""))
    views: list[tuple[View, Look]] = [
        (PoolView(), seen),
        (JobsView(""), listed),
        (JobsView("w1"), look(workers, Focus(worker="w1"))),
        (JobsView("nobody"), look(workers, Focus(worker="nobody"))),
        (JobView("1" * 32), look(workers, Focus(job="1" * 32))),
        (JobView("0" * 32), listed),
    ]
    for view, shown in views:
        for key in ("", "end", "pageup", "down", "home", "up"):
            view.key(key)
            lines = view.draw(shown, history, width, height)
            assert len(lines) <= max(height, 3)  # a heading, titles and a row; the rest is cut off
            for line in lines:
                assert cell_len(line.plain.rstrip()) <= width, (type(view), line.plain)
                assert line.plain.isprintable()


def test_the_chosen_row_stays_with_its_id_and_in_sight() -> None:
    view, history = PoolView(), History()
    view.draw(look(50), history, 80, 20)
    for _ in range(30):
        view.key("down")
    lines = view.draw(look(50), history, 80, 20)
    (chosen,) = [line.plain.split()[0] for line in lines if line.style == "reverse"]
    fewer = look(50)
    fewer.state["workers"] = [it for it in fewer.state["workers"] if it["worker_id"] not in {"w1", "w2", "w3"}]
    lines = view.draw(fewer, history, 80, 20)
    assert [line.plain.split()[0] for line in lines if line.style == "reverse"] == [chosen]
    fewer.state["workers"] = [it for it in fewer.state["workers"] if it["worker_id"] != chosen]
    assert any(line.style == "reverse" for line in view.draw(fewer, history, 80, 20))


def test_rates_come_from_what_ended_between_two_looks() -> None:
    history = History()
    first, second = look(ended={"done": 10}, open_jobs=40), look(ended={"done": 20}, open_jobs=40)
    history.add(Look(100.0, first.state))
    assert (history.jobs_per_s(), history.seconds_of_work(first.state)) == (None, None)
    history.add(Look(105.0, second.state))
    assert (history.jobs_per_s(), history.seconds_of_work(second.state)) == (2.0, 20.0)
    history.add(Look(106.0, first.state))  # somebody emptied Redis
    assert history.jobs_per_s() in {0.0, None}
    assert history.seconds_of_work(first.state | {"open_jobs": 0}) == 0.0


def test_curves_and_figures() -> None:
    assert curve(deque([0.0, 1.0, 4.0]), 10) == "▁▃█"
    assert curve(deque([0.0, 0.0]), 10) == "▁▁"
    assert (curve(deque([1.0, 2.0]), 1), curve(deque(), 5), curve(deque([1.0]), 0)) == ("█", "", "")
    assert [short(it) for it in (0, 9999, 12_345, 1_234_567, 10**15)] == ["0", "9,999", "12.3k", "1,235k", "1,000T"]
    assert [lasting(it) for it in (None, 0, 99, 600, 10**5, 10**7)] == ["–", "0 s", "99 s", "10 min", "28 h", "116 d"]
    assert [nbytes(it) for it in (5, 2048, 5 << 20, 3 << 30)] == ["5 B", "2.0 KiB", "5.0 MiB", "3.0 GiB"]


async def test_keys_that_come_in_pieces() -> None:
    heard: list[str] = []
    master, slave = pty.openpty()
    try:
        with Keyboard(heard.append, slave):
            os.write(master, b"\x1b")
            os.write(master, b"[Bj\x1bOA\x1b[5~\x1b[31~x\r")  # F7 and x mean nothing
            await eventually(lambda: len(heard) == 5)
            assert heard == ["down", "down", "up", "pageup", "enter"]
            os.write(master, b"\x1b")
            await eventually(lambda: heard[5:] == ["escape"])
            os.write(master, b"\xff\x1bq")
            await eventually(lambda: heard[6:] == ["escape", "quit"])
    finally:
        os.close(master)
        os.close(slave)


async def test_a_terminal_that_is_gone_ends_it() -> None:
    heard: list[str] = []
    master, slave = pty.openpty()
    with Keyboard(heard.append, slave):
        os.close(master)
        await eventually(lambda: heard == ["quit"])
        await asyncio.sleep(0)
    os.close(slave)
