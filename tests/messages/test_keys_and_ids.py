"""Names in Redis and job ids: forms that other code relies on."""

from __future__ import annotations

import pytest

from rolloutmq.messages import InvalidField, Keys, new_id
from rolloutmq.messages.ids import is_id


def test_every_key_of_a_pool_has_its_hash_tag() -> None:
    keys = Keys("p.1")
    names = [
        *keys.queues,
        keys.job("j"),
        keys.held("w"),
        keys.worker("w"),
        keys.reply("c"),
        keys.version(1),
        keys.epoch(1),
        keys.workers,
        keys.deadlines,
        keys.load,
        keys.wake,
        keys.bell,
        keys.dead,
        keys.weights,
        keys.holders,
        keys.transfers,
    ]
    assert all(name.startswith("rmq:{p.1}:") for name in names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("pool", ["", "a b", "a}b", "{a", "a" * 65, "ü", "a\n", "a:b"])
def test_a_pool_name_that_could_not_be_a_hash_tag(pool: str) -> None:
    with pytest.raises(InvalidField, match="pool="):
        Keys(pool)


def test_ids_are_fixed_length_and_sort_by_time() -> None:
    ids = [new_id(now_ms) for now_ms in (0, 1, 1_700_000_000_000, 1_700_000_000_001, (1 << 48) - 1)]
    assert ids == sorted(ids)
    for one in ids:
        assert is_id(one)
        assert one[12] == "7"
        assert one[16] in "89ab"
    assert len({new_id(5) for _ in range(1000)}) == 1000
    fresh = [new_id() for _ in range(5000)]  # many of them in one millisecond
    assert fresh == sorted(set(fresh))
    assert all(map(is_id, fresh))
    assert not is_id(ids[0] + "\n")
    assert not is_id(ids[0].upper().replace("0", "G"))
