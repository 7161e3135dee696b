"""Which outcomes reach whom: each once, in their order, tasks their callers only, however often they come."""

from __future__ import annotations

import pytest
from support.specimens.messages import job, result

from rolloutmq.messages import JobFailure, new_id
from rolloutmq.messages.broker import Reply
from rolloutmq.producer.inbox import Inbox


def failure(job_id: str) -> Reply:
    return Reply("1-0", JobFailure(job_id=job_id, outcome="cancelled", cause="its caller gave up"), True)


@pytest.mark.parametrize("given_up", [False, True])
def test_what_comes_of_a_task_again_is_dropped(given_up: bool) -> None:
    inbox, job_id = Inbox(), new_id()
    inbox.expect(job_id, 2)
    assert (inbox.jobs, inbox.outstanding, inbox.free, inbox.samples) == (1, 0, 0, 0)
    if given_up:
        assert inbox.abandon(job_id) == []
    else:
        assert inbox.put(failure(job_id))
        assert len(inbox.take_job(job_id)) == 1
    inbox.release(job_id)
    for _ in range(2):
        assert not inbox.put(failure(job_id))
    assert (len(inbox), inbox.jobs, inbox.samples) == (0, 0, 0)


def test_a_failure_of_another_job_is_for_whoever_takes_samples() -> None:
    inbox = Inbox()
    assert inbox.put(failure(new_id()))
    assert len(inbox) == 1


def test_what_came_again_is_not_given_again_and_what_was_given_back_goes_first() -> None:
    one, samples = job(n=3), Inbox()
    first, second, third = (Reply(f"{i}-0", result(one, i), i == 2) for i in range(3))
    assert [samples.put(it) for it in (first, second)] == [True, True]
    assert samples.take_next() is first
    assert not samples.put(first)
    samples.put_back([first])
    assert samples.put(third)
    assert [samples.take_next() for _ in range(4)] == [first, second, third, None]
    assert (samples.repeats, samples.jobs) == (1, 0)
