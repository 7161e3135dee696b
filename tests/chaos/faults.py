"""Faults at random moments, on everything a pool consists of; the dice say which, on whom, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from .context import Chaos
from .processes import Spoken, WorkerProcess
from .proxy import Proxy, script_names

WORKER = {"max_running": 24, "tokens_per_s": 150, "checkpoint_s": 0.3, "tools": True, "lora": True, "torch": True}


@dataclass
class Faults:
    """Breaks what it is given. near, far: the network of the clients and of the workers. count: what was done."""

    chaos: Chaos
    near: Proxy
    far: Proxy
    workers: list[WorkerProcess]
    clients: list[Spoken]
    begin_client: Callable[[int], Awaitable[Spoken]]
    count: Counter[str] = field(default_factory=Counter)
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Lock = field(default_factory=asyncio.Lock)
    _client: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def go_on(self, dice: random.Random) -> None:
        """One fault after the other until `enough`; each is mended before the next."""
        while not self.enough.is_set():
            (fault,) = dice.choices(list(FAULTS), list(FAULTS.values()))
            self.count[fault.__name__] += 1
            await fault(self, dice)
            await asyncio.sleep(dice.uniform(0, 1.0))

    async def kill_worker(self, dice: random.Random) -> None:
        place = dice.randrange(len(self.workers))
        await self.workers[place].kill()
        self.workers[place] = await self.chaos.worker(self.far.url, **WORKER)

    async def drain_worker(self, dice: random.Random) -> None:
        place = dice.randrange(len(self.workers))
        with contextlib.suppress(ProcessLookupError):
            self.workers[place].signal(signal.SIGTERM)
        self.workers[place] = await self.chaos.worker(self.far.url, **WORKER)

    async def freeze_worker(self, dice: random.Random) -> None:
        await self._freeze(dice.choice(self.workers), dice.uniform(0.1, 2.5 * self.chaos.lease_s))

    async def kill_client(self, dice: random.Random) -> None:
        place = dice.randrange(len(self.clients))
        async with self._client:  # one process for each client id
            await self.clients[place].kill()
            self.clients[place] = await self.begin_client(place)

    async def freeze_client(self, dice: random.Random) -> None:
        await self._freeze(dice.choice(self.clients), dice.uniform(0.1, 3.0))

    @staticmethod
    async def _freeze(process: Spoken, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)  # how long it is frozen
            finally:
                process.signal(signal.SIGCONT)

    async def kill_redis(self, dice: random.Random) -> None:
        async with self._server:
            server = dice.choice(self.chaos.servers)
            server.kill()
            await asyncio.to_thread(server.start)

    async def freeze_redis(self, dice: random.Random) -> None:
        async with self._server:
            server = dice.choice(self.chaos.servers)
            os.kill(server.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(dice.uniform(0.1, 1.5 * self.chaos.lease_s))  # how long it is frozen
            finally:
                os.kill(server.pid, signal.SIGCONT)

    async def cut(self, dice: random.Random) -> None:
        proxy = dice.choice((self.near, self.far))
        proxy.cut(*dice.choice((("up",), ("down",), ("up", "down"))))
        try:
            await asyncio.sleep(dice.uniform(0.1, 2 * self.chaos.lease_s))  # how long it is cut
        finally:
            proxy.heal()

    async def break_connections(self, dice: random.Random) -> None:
        dice.choice((self.near, self.far)).close_all()

    async def lose_a_reply(self, dice: random.Random) -> None:
        kind = f"EVALSHA {dice.choice(script_names())}"
        dice.choice((self.near, self.far)).drop_reply(kind)

    async def slow_network(self, dice: random.Random) -> None:
        proxy = dice.choice((self.near, self.far))
        proxy.delay_s = dice.uniform(0, 0.03)
        try:
            await asyncio.sleep(1.0)  # how long it is slow
        finally:
            proxy.delay_s = 0.0


FAULTS = {
    Faults.kill_worker: 3,
    Faults.drain_worker: 2,
    Faults.freeze_worker: 3,
    Faults.kill_client: 3,
    Faults.freeze_client: 2,
    Faults.kill_redis: 1,
    Faults.freeze_redis: 1,
    Faults.cut: 3,
    Faults.break_connections: 3,
    Faults.lose_a_reply: 5,
    Faults.slow_network: 1,
}
"""How often each, compared with the others."""
