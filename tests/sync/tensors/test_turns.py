"""A thread that receives beside one that never rests."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from rolloutmq.sync.receive.receiver import Receiver
from rolloutmq.sync.receive.state import RankState
from rolloutmq.sync.tensors.runtime import SHORT_S, short_turns
from rolloutmq.sync.transfer.ledger import VersionHolder
from rolloutmq.sync.transfer.order import TransferOrder

ORDER = TransferOrder.from_holders(None, [VersionHolder(1, "127.0.0.1:1", "token")], "", "w", timeout_s=0.5)


def test_turns_are_short_as_long_as_anybody_wants_them() -> None:
    before = sys.getswitchinterval()
    assert before > SHORT_S
    with short_turns():
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(SHORT_S)
        assert sys.getswitchinterval() == pytest.approx(SHORT_S)
    assert sys.getswitchinterval() == before
    with pytest.raises(KeyError), short_turns():
        raise KeyError
    assert sys.getswitchinterval() == before


def test_a_receiver_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, hear = [], RankState.hear

    def heard(*args: Any) -> Any:
        seen.append(sys.getswitchinterval())
        return hear(*args)

    monkeypatch.setattr(RankState, "hear", heard)
    before = sys.getswitchinterval()
    report = Receiver(torch.device("cpu")).prepare(ORDER)
    assert not report.ok
    assert seen == [pytest.approx(SHORT_S)]
    assert sys.getswitchinterval() == before
