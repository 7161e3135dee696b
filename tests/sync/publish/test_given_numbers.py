"""A version's number that an operator's command gave to weights names these and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.peers.publishing import publish, publisher
from support.pools.pool import worker

from rolloutmq.messages import WeightSyncError
from rolloutmq.producer.control import PoolControl


async def test_a_number_is_given_to_one_set_of_weights(redis_db: str, tmp_path: Path) -> None:
    """Else samples of a trainer's version 7 and of an operator's could not be told apart."""
    async with (
        PoolControl(redis_db) as control,
        publisher(redis_db) as trainer,
        worker(redis_db) as one,
        worker(redis_db) as other,
    ):
        await publish(trainer, 3)
        (await control.save(str(tmp_path), worker_id=one.id)).check()
        folder = tmp_path / "v000000000003"
        (await control.set_version(7)).check()
        assert await control.versions() == {one.id: 7, other.id: 7}
        with pytest.raises(WeightSyncError, match=r"version 7: .* an operator's command has given this number"):
            await publish(trainer, 7)
        answers = await control.load(str(folder), 7)
        assert {answer.kind for answer in answers.values()} == {"InvalidField"}
        (await control.load(str(folder), 8, worker_id=one.id)).check()
        refused = (await control.set_version(8, worker_id=other.id))[other.id]
        assert (refused.kind, "above 8: that number is taken" in refused.error) == ("InvalidField", True)
        (await control.load(str(folder), 8, worker_id=other.id)).check()
        assert await control.versions() == {one.id: 8, other.id: 8}
        assert (await publish(trainer, 9)).state == "committed"


async def test_of_two_trainers_the_second_cannot_give_a_number_away_again(redis_db: str) -> None:
    """A worker that joins meanwhile would have other weights under the number than those that have it."""
    async with publisher(redis_db) as first, publisher(redis_db) as second, worker(redis_db) as one:
        await publish(first, 3)
        for taken in (2, 3):
            with pytest.raises(WeightSyncError, match=rf"version {taken}: another trainer .* publish under a higher"):
                await publish(second, taken)
        assert (await publish(second, 4)).workers == (one.id,)
