"""Progress bars of map, groups and submit_many, with a real pool."""

from __future__ import annotations

import pytest
from support.bars import last_line, stderr_as_terminal
from support.specimens.messages import tokens

from rolloutmq import BlockingRolloutClient, InvalidField, RolloutClient
from rolloutmq.messages import Broker, GenerateJob
from rolloutmq.messages.broker import Caps


def late(n: int) -> GenerateJob:
    """A job that ends as expired: no worker has its version in time."""
    return tokens(n=n, min_version=7, deadline_s=0.2)


async def test_map_counts_samples_and_failures(serving: None, client: RolloutClient) -> None:
    jobs = [*(tokens(n=2) for _ in range(5)), late(3)]
    with stderr_as_terminal() as screen:
        outcomes = [one async for one in client.map(jobs, window=3, timeout=20, progress="night run")]
    shown = last_line(screen)
    assert len(outcomes) == 11
    assert shown.startswith("night run ")
    assert "13/13" in shown, "ten results, and three samples of the job that failed"
    assert "3 failed" in shown


async def test_of_a_generator_nobody_knows_the_total(serving: None, client: RolloutClient) -> None:
    with stderr_as_terminal() as screen:
        async for _ in client.map((tokens() for _ in range(4)), timeout=20, progress=True):
            pass
    assert "4/?" in last_line(screen)


async def test_groups_and_jobs_that_go_in(serving: None, client: RolloutClient) -> None:
    with stderr_as_terminal() as screen:
        await client.submit_many([*(tokens(n=2) for _ in range(5)), late(2)], progress=True)
    assert last_line(screen).startswith("submitted ")
    assert "6/6" in last_line(screen)
    with stderr_as_terminal() as screen:
        found = [group async for group in client.groups(20, progress=True)]
    assert len(found) == 6
    assert "6/6" in last_line(screen)
    assert "1 failed" in last_line(screen)


async def test_a_loop_that_is_left_ends_its_bar(serving: None, client: RolloutClient) -> None:
    with stderr_as_terminal() as screen:
        async for _ in client.map([tokens() for _ in range(4)], timeout=20, progress=True):
            break
    assert not screen.cursor.hidden
    assert len([one async for one in client.results(20)]) == 3, "and costs nothing"


async def test_without_a_bar_or_a_terminal_nothing_is_written(
    serving: None, client: RolloutClient, capsys: pytest.CaptureFixture[str]
) -> None:
    for progress in (False, True):
        await client.submit_many([tokens()], progress=progress)
        assert len([one async for one in client.groups(20, progress=progress)]) == 1
    assert capsys.readouterr() == ("", "")


def test_the_blocking_client_has_them_too(redis_db: str, serving_thread: None) -> None:
    with BlockingRolloutClient(redis_db) as client:
        with stderr_as_terminal() as screen:
            client.submit_many([tokens(n=2) for _ in range(3)], progress=True)
            assert len(list(client.groups(20, progress="two by two"))) == 3
        assert "3/3" in last_line(screen)
        assert last_line(screen).startswith("two by two")
        with stderr_as_terminal() as screen:
            assert len(list(client.map([tokens() for _ in range(3)], timeout=20, progress=True))) == 3
        assert "3/3" in last_line(screen)


async def test_what_is_no_name_is_refused(serving: None, client: RolloutClient) -> None:
    with pytest.raises(InvalidField, match="progress"):
        client.map([tokens()], progress=3)  # type: ignore[arg-type]


async def test_a_full_pool_is_seen_filling(serving: None, broker: Broker, redis_db: str) -> None:
    """What did not fit counts when it goes in: each job once."""
    async with RolloutClient(redis_db, caps=Caps(jobs=3)) as small:
        with stderr_as_terminal() as screen:
            handles = await small.submit_many([tokens() for _ in range(12)], timeout=30, progress=True)
        assert "12/12" in last_line(screen)
        assert len({handle.job_id for handle in handles}) == 12
