"""Anybody who reaches the ports of weights may connect to them. It delays no version, and takes no descriptors."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from support.peers.peers import Line, line, version
from support.pools.pool import eventually

from rolloutmq.sync.publish import cells
from rolloutmq.sync.wire.shelf import STRANGERS

MORE = 60
SAID = {
    "nothing": b"",
    "half a frame": b"?" + (60_000).to_bytes(8, "big") + b"half",
    "another token": b"?" + (8).to_bytes(8, "big") + b"\x81\xa5token\x01",
}


@pytest.fixture
def made() -> Iterator[Line]:
    with line("cpu", "cpu") as two:
        yield two


def came(made: Line, number: int) -> bool:
    return all(report is not None and report.ok for report in made.transfer(version(number)))


def is_closed(stranger: socket.socket) -> bool:
    try:
        return not stranger.recv(1 << 16, socket.MSG_DONTWAIT) or is_closed(stranger)  # after a refusal
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
@pytest.mark.parametrize("whose", ["sender", "receiver"])
async def test_strangers_are_bounded_and_versions_come(made: Line, whose: str, said: bytes) -> None:
    assert came(made, 1)
    address = made.hub.address if whose == "sender" else made.peers[0].ask(address=True)
    host, _, port = address.rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(STRANGERS + MORE)]
    try:
        for stranger in strangers:
            stranger.send(said)
        assert came(made, 2)
        await eventually(lambda: sum(map(is_closed, strangers)) >= MORE, what="those that came first are closed")
        assert not is_closed(strangers[-1]), "there is room for it"
        assert [made.hub.lost(peer.name)[0] for peer in made.peers] == ["", ""], "who is known is kept"
    finally:
        for stranger in strangers:
            stranger.close()


async def test_a_store_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with line("cpu", "cpu", cells=True) as made:
        assert came(made, 1)
        before = {peer.ask(group=True) for peer in made.peers}
        with monkeypatch.context() as ill:
            ill.setattr(cells, "begin", lambda ask: Future())  # nobody answers
            reports = made.transfer(version(2))
        assert [report.way for report in reports if report is not None and report.ok] == ["nccl", "nccl"]
        after = {peer.ask(group=True) for peer in made.peers}
        assert len(before) == len(after) == 1
        assert before != after
        assert came(made, 3)
        assert {peer.ask(group=True) for peer in made.peers} == after, "the new one is kept"
