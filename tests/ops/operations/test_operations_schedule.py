"""Operations on a schedule: whoever submits, and however often, one run for each slot of time."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from support.pools.operations import work
from typer.testing import CliRunner

from rolloutmq.messages import InvalidField
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.operations import rq_queue
from rolloutmq.ops.operations.rq_queue import OperationQueue

AUDIT = {"pause_s": 0.01}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which slots are cut; the test moves it."""
    now = [3600 * 300_000.0]
    monkeypatch.setattr(rq_queue, "time", SimpleNamespace(time=lambda: now[0]))
    return now


def test_schedulers_at_the_same_time_queue_one_run(queue: OperationQueue, redis_db: str, clock: list[float]) -> None:
    def schedule(_: int) -> str:
        with OperationQueue(redis_db, "default") as mine:
            return mine.submit("audit-broker", AUDIT, 3600)

    with ThreadPoolExecutor(8) as schedulers:
        ids = set(schedulers.map(schedule, range(40)))
    assert [run.id for run in queue.runs()] == list(ids)
    assert queue.redis.llen(f"rq:queue:{queue.name}") == 1


def test_each_slot_has_a_run_whatever_became_of_the_one_before(
    queue: OperationQueue, redis_db: str, clock: list[float]
) -> None:
    first = queue.submit("audit-broker", AUDIT, 3600)
    assert work(queue, redis_db)
    assert queue.run(first).state == "finished"
    clock[0] += 1200  # in the same slot, after it is over
    assert queue.submit("audit-broker", AUDIT, 3600) == first
    assert not work(queue, redis_db)
    clock[0] += 3600
    second = queue.submit("audit-broker", AUDIT, 3600)
    queue.cancel(second)
    assert queue.submit("audit-broker", AUDIT, 3600) == second
    assert not work(queue, redis_db)
    clock[0] += 3600
    third = queue.submit("audit-broker", AUDIT, 3600)
    assert len({first, second, third}) == 3
    assert queue.redis.llen(f"rq:queue:{queue.name}") == 1


def test_other_parameters_periods_and_pools_have_slots_of_their_own(
    queue: OperationQueue, redis_db: str, clock: list[float]
) -> None:
    with OperationQueue(redis_db, "other") as other:
        asked: list[tuple[OperationQueue, dict[str, Any], float | None]] = [
            (queue, AUDIT, 3600), (queue, {}, 3600), (queue, AUDIT, 60), (other, AUDIT, 3600), (queue, AUDIT, None)
        ]  # fmt: skip
        assert len({where.submit("audit-broker", params, period) for where, params, period in asked}) == 5


def test_a_record_outlives_its_slot(queue: OperationQueue, redis_db: str) -> None:
    run_id = queue.submit("audit-broker", AUDIT, 86400)
    work(queue, redis_db)
    with redis.Redis.from_url(redis_db) as db:
        assert db.ttl(f"rq:job:{run_id}") > 80_000
    for bad in (59.0, 86401.0, float("nan")):
        with pytest.raises(InvalidField, match="once_per="):
            queue.submit("audit-broker", AUDIT, bad)


def test_the_command(redis_db: str, clock: list[float]) -> None:
    command = ["ops", "run", "audit-broker", "--once-per", "1h", "--json", "--redis", redis_db]
    once, again = (json.loads(CliRunner().invoke(app, command).stdout)["id"] for _ in range(2))
    assert once == again
    for wrong, says in (("soon", "a time such as 90s"), ("2d", "60 to 86400 seconds"), ("1h", "not together")):
        ended = CliRunner().invoke(app, [*command[:4], wrong, *(["--here"] if wrong == "1h" else []), *command[6:]])
        assert ended.exit_code == 2
        assert says in ended.stderr
