"""Which outcomes reach whom: tasks their callers only, however often they come."""

from __future__ import annotations

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
