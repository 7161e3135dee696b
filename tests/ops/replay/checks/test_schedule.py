"""Who had what when: timelines and broken promises from entries as clients and workers write them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.specimens.messages import result

from rolloutmq.messages import GenerateJob, Timings
from rolloutmq.messages.journal import Entry
from rolloutmq.ops.replay.checks import schedule_of

JOB = "a" * 32


def attempt(at: float, what: str, worker: str = "w1", number: int = 1, job: str = JOB, **more: Any) -> Entry:
    """What a worker wrote about an attempt."""
    sample, versions = more.pop("sample", -1), more.pop("versions", ())
    told = {"what": what, "worker": worker, "state": "ok"} | more
    return Entry("attempt", at, job, sample=sample, attempt=number, versions=versions, data=told)


def arrived(at: float, worker: str = "w1", number: int = 1, job: str = JOB, **more: Any) -> Entry:
    """A result that a client got, of an attempt that took a second in the engine and half a second beside it."""
    asked = GenerateJob(id=job, token_ids=[5, 6], n=2, reply_to="me")
    timings = Timings(queued=0.25, generating=1.0, waiting=0.5)
    message = result(asked, 0, **({"worker_id": worker, "attempt": number, "timings": timings} | more))
    return Entry("result", at, job, "me", sample=0, attempt=number, content=message)


def worker(at: float, what: str, name: str = "w1") -> Entry:
    return Entry("worker", at, data={"what": what, "worker": name})


WHOLE = [
    attempt(10.0, "claimed", queued_s=0.5, samples=1),
    attempt(12.0, "saved", sample=0, start=0, tokens=4, versions=(1,)),
    attempt(14.0, "published", sample=0, versions=(1, 2)),
    arrived(14.5),
    worker(20.0, "left"),
]


def test_a_timeline_is_put_together() -> None:
    other = "b" * 32
    load = {"what": "loaded", "worker": "w1", "load_s": 0.5, "seconds": 2.0, "mode": "resume"}
    entries = [
        *WHOLE,
        Entry("weights", 13.0, versions=(2,), data=load),
        Entry("weights", 30.0, versions=(3,), data=load),  # nobody waited
        attempt(17.0, "claimed", job=other, queued_s=1.5, samples=1),
        attempt(18.0, "published", job=other, sample=0, versions=(2,)),
        attempt(15.0, "claimed", "w2", job="c" * 32, queued_s=0.0, samples=1),
        attempt(16.0, "given back", "w2", job="c" * 32, lost=False),
    ]
    found = schedule_of(entries)
    assert found.violations == []
    one, two = found.workers["w1"], found.workers["w2"]
    assert (one.start, one.span_s, one.busy_s, one.attempts) == (10.0, 8.0, 5.0, 2)
    assert one.gaps == ((14.0, 3.0),)
    assert (two.span_s, two.busy_s) == (1.0, 1.0)
    assert found.queue_s["largest"] == 1.5
    (stall,) = found.stalls
    assert (stall.worker, stall.version, stall.seconds, stall.jobs) == ("w1", 2, 0.5, 1)
    assert "stall: version 2 held up w1 for 0.500 s, with 1 jobs" in found.lines()
    assert found.lines()[-1] == "every promise that can be checked was kept"


def test_results_alone_say_when_a_worker_was_busy() -> None:
    found = schedule_of([arrived(10.0), arrived(20.0, job="b" * 32)])
    one = found.workers["w1"]
    assert (one.start, one.span_s, one.busy_s) == (8.5, 11.5, 3.0)
    assert one.gaps == ((10.0, 8.5),)
    assert found.queue_s["p50"] == 0.25
    assert schedule_of([]).lines()[0] == "nothing happened"


@pytest.mark.parametrize(
    ("more", "violation"),
    [
        ([attempt(15.0, "published", sample=0)], "was published 2 times"),
        ([attempt(11.0, "claimed", "w2")], "attempt 1 of .* was claimed by w1 and by w2"),
        ([attempt(5.0, "claimed", "w2", 2)], "attempt 2 of .* was claimed before attempt 1"),
        ([attempt(12.0, "claimed", "w2", 2)], "published by attempt 1 after attempt 2 had begun"),
        ([worker(12.5, "lease lost")], "published by w1 after its lease had ended"),
        ([arrived(16.0, token_ids=[9, 9])], "came twice"),
        ([arrived(16.0, "w2")], "came twice"),
        ([attempt(12.5, "saved", sample=0, start=4, tokens=2, versions=(0,))], "went back from version 1 to 0"),
        ([Entry("result", 15.0, JOB, sample=1, content=b"\x01\x00\x02broken")], "cannot be read"),
    ],
)
def test_a_broken_promise_is_named(more: list[Entry], violation: str) -> None:
    found = schedule_of([*WHOLE, *more])
    assert [one for one in found.violations if re.search(violation, one)]
    assert found.lines()[-1].startswith("VIOLATION")


@pytest.mark.parametrize(
    "more",
    [
        [arrived(16.0)],  # again, after a crash of the client
        [attempt(15.0, "published", sample=0, state="again")],
        [attempt(15.0, "published", "w2", 2, sample=0, state="fenced")],
        [attempt(13.5, "claimed", "w2", 2)],  # by another host's clock
        [attempt(16.0, "saved", "w2", 2, sample=0, start=0, tokens=2, versions=(0,))],  # it began anew
        [worker(13.5, "lease lost")],  # Redis had accepted it before; its answer came later
        [worker(20.5, "lease lost"), attempt(21.0, "published", "w1", sample=1, state="fenced")],
    ],
)
def test_what_may_happen_is_no_violation(more: list[Entry]) -> None:
    assert schedule_of([*WHOLE, *more]).violations == []


@given(st.permutations([*WHOLE, attempt(13.5, "claimed", "w2", 2, queued_s=0.1)]))
def test_the_order_of_entries_does_not_matter(entries: list[Entry]) -> None:
    assert schedule_of(entries) == schedule_of([*WHOLE, attempt(13.5, "claimed", "w2", 2, queued_s=0.1)])
