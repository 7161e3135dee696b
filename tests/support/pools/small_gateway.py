"""What a gateway does for requests with a key, without HTTP; also as a process, to be killed:

    python -m support.pools.small_gateway URL STAGE KEY

It asks for KEY, says its name when it has come to STAGE, and stays there: "begun", "submitted", "taken" or "inherits".

A gateway is dead when a test says so: no busy machine lets its life run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Self

from support.pools.pool import eventually

from rolloutmq import GenerateJob, RolloutMQError
from rolloutmq.messages import connect
from rolloutmq.messages.errors import TurnRefused
from rolloutmq.ops.gateway.answers import Answer
from rolloutmq.ops.gateway.heir import Gateways
from rolloutmq.ops.gateway.requests import Request, RequestLost, Requests
from rolloutmq.producer.calls import run
from rolloutmq.producer.core import ClientCore
from rolloutmq.producer.inbox import Group

Stages = Callable[[str], Awaitable[None]]
PROMPTS = ([5, 6], [7])


async def nowhere(_: str) -> None:
    """It goes on."""


class SmallGateway:
    """stage(name): awaited at each stage of a request that is run here."""

    def __init__(self, url: str, stage: Stages = nowhere, pool: str = "default") -> None:
        self.url, self.stage = url, stage
        self.pool = pool
        self.redis = connect(url, pool=pool)
        self.requests = Requests(self.redis, pool, record=self.record)
        self.gateways = Gateways(url, self.requests, renamed=self.renamed, beat_s=0.1, alive_s=3600.0)
        self.recorded: list[str] = []
        self.cores: dict[str, ClientCore] = {}
        self.refused: list[str] = []
        self.closed: list[str] = []
        self.beating = asyncio.create_task(self.gateways.run())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self.gateways.leave()
        await asyncio.gather(*(core.close() for core in self.cores.values()))
        await self.redis.aclose()

    async def stall(self) -> None:
        """It has not said for too long that it lives, and hears of nothing."""
        await self.stop()
        await self.redis.delete(self.requests.keys.gateway(self.gateways.name))

    async def stop(self) -> None:
        """It says nothing any more."""
        self.beating.cancel()
        await asyncio.wait([self.beating])

    def wake(self) -> None:
        self.beating = asyncio.create_task(self.gateways.run())

    async def open_jobs(self, count: int) -> bool:
        """Whether its clients have so many jobs in the pool."""
        found = [await core.broker.open_jobs(owner) for owner, core in self.cores.items()]
        return sum(map(len, found)) == count

    async def record(self, request: Request, _: list[list[Any]]) -> None:
        await self.stage("taken" if request.owner in self.cores else "inherits")
        self.recorded.append(request.id)
        if request.id in self.refused:
            raise TurnRefused("it was taken", "taken")

    async def renamed(self, old: list[str]) -> None:
        self.closed += old
        await asyncio.gather(*(self.cores.pop(it).close() for it in old if it in self.cores))

    async def ask(self, key: str, body: str = "body", **fields: Any) -> Answer:
        """The answer to a request with this key, whoever runs it."""
        digest = hashlib.sha256(body.encode()).digest()
        while True:
            owner = await self.gateways.join("acme")
            if (core := self.cores.get(owner)) is None:
                core = ClientCore(self.url, self.pool, client_id=owner, max_outstanding=99, caps=None)
                self.cores[owner] = core
            request = await self.requests.begin("acme", key, digest, owner, prompts=PROMPTS)  # type: ignore[arg-type]
            if request.answer is not None:
                return request.answer
            with contextlib.suppress(RequestLost):
                if request.state == "new":
                    return await self.run(core, request, **fields)
                if (answer := await self.requests.wait(request, 60)) is not None:
                    return answer

    async def run(self, core: ClientCore, request: Request, **fields: Any) -> Answer:
        """Run a request that is new; if others take this gateway for dead, have the answer from them."""
        answer: Answer = []

        async def finish(groups: list[Group]) -> None:
            nonlocal answer
            answer = await self.requests.finish(request, [[*it.results] for it in groups])

        await self.stage("begun")
        jobs = [
            GenerateJob(id=job_id, group_id=request.id, token_ids=prompt, **fields)
            for job_id, prompt in zip(request.job_ids, PROMPTS, strict=True)
        ]
        try:
            await run(core, jobs, 10.0, finish)
        except RolloutMQError as error:
            await self.requests.drop(request)
            if isinstance(error, RequestLost) or not core.reader.over:
                raise
            answered = await self.requests.wait(request, 60)
            assert answered is not None
            return answered
        return answer


async def main(url: str, at: str, key: str) -> None:
    async def stage(name: str) -> None:
        if name == at:
            print(gateway.gateways.name, flush=True)
            await asyncio.Event().wait()

    async with SmallGateway(url, stage) as gateway:
        asked = asyncio.create_task(gateway.ask(key, n=2, sampling={"max_new_tokens": 4}))
        if at == "submitted":
            await eventually(lambda: gateway.open_jobs(len(PROMPTS)))
            print(gateway.gateways.name, flush=True)
        await asked


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
