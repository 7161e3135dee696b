"""Which outcomes reach whom: each once, in their order, tasks their callers only, however often they come."""

from __future__ import annotations

from support.specimens.messages import job, result

from rolloutmq.messages import JobFailure, new_id
from rolloutmq.messages.broker import Reply
from rolloutmq.producer.inbox import Inbox, Inboxes


def failure(job_id: str) -> Reply:
    return Reply("1-0", JobFailure(job_id=job_id, outcome="cancelled", cause="its caller gave up"), True)


def test_a_task_that_failed_comes_again_after_a_failover_and_is_no_sample() -> None:
    samples = Inbox()
    inboxes, job_id = Inboxes(samples), new_id()
    inboxes.expect(job_id, job_id, 2)
    assert inboxes.put(failure(job_id))
    assert len(inboxes.tasks.take_job(job_id)) == 1
    assert not inboxes.put(failure(job_id))
    assert (len(samples), samples.jobs, inboxes.jobs) == (0, 0, 0)


def test_what_comes_of_a_task_that_was_given_up_is_dropped_every_time() -> None:
    samples = Inbox()
    inboxes, job_id = Inboxes(samples), new_id()
    inboxes.expect(job_id, job_id, 2)
    assert inboxes.abandon(job_id) == []
    for _ in range(2):
        assert not inboxes.put(failure(job_id))
    assert (len(samples), samples.jobs, inboxes.jobs) == (0, 0, 0)


def test_a_failure_of_another_job_is_for_whoever_takes_samples() -> None:
    samples = Inbox()
    assert Inboxes(samples).put(failure(new_id()))
    assert len(samples) == 1


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
