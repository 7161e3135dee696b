"""Two gateways behind agents that ask the other one when one does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from support.keys import keys_file
from support.pools.pool import check_scripted

from rolloutmq import RolloutClient
from rolloutmq.messages.errors import NoSuchSession

from ..agent import Agent
from ..context import POOL, Chaos, until
from ..gateway_process import ALIVE_S
from ..processes import GatewayProcess, Spoken, WorkerProcess
from ..scenario import scenario

AGENTS = 8
WORKER = {"max_running": 16, "tokens_per_s": 100, "checkpoint_s": 0.3, "max_lost": 1000}


@dataclass
class Trouble:
    """What befalls gateways, workers and the server, one thing at a time. way: the URL of Redis that gateways have, and
    more of what they are started with."""

    chaos: Chaos
    way: list[str]
    gateways: list[GatewayProcess]
    workers: list[WorkerProcess]
    dice: random.Random
    count: Counter[str] = field(default_factory=Counter)

    async def go_on(self, faults: list[Callable[[Trouble], Awaitable[None]]]) -> None:
        for fault in faults:
            await asyncio.sleep(self.dice.uniform(0.2, 1.0))  # at a moment that nobody chose
            await fault(self)
            self.count[fault.__name__] += 1

    async def kill_gateway(self) -> None:
        place = self.dice.randrange(len(self.gateways))
        await self.gateways[place].kill()
        self.gateways[place] = await begin_gateway(self.chaos, *self.way)

    async def leave_gateway(self) -> None:
        place = self.dice.randrange(len(self.gateways))
        leaving, self.gateways[place] = self.gateways[place], await begin_gateway(self.chaos, *self.way)
        leaving.signal(signal.SIGTERM)
        self.chaos.expect(await leaving.ended(40) == 0, "a gateway did not leave well")

    async def freeze_gateway(self) -> None:
        """For so short that nobody notices, or for so long that the other one inherits."""
        await freeze(self.dice.choice(self.gateways), self.dice.choice((0.5, 1.0, 3.0)) * ALIVE_S)

    async def kill_worker(self) -> None:
        place = self.dice.randrange(len(self.workers))
        await self.workers[place].kill()
        self.workers[place] = await self.chaos.worker(**WORKER)

    async def freeze_worker(self) -> None:
        await freeze(self.dice.choice(self.workers), self.dice.uniform(0.1, 2.0) * self.chaos.lease_s)

    async def kill_redis(self) -> None:
        self.chaos.redis.kill()
        await asyncio.to_thread(self.chaos.redis.start)


FAULTS = [
    *[Trouble.kill_gateway] * 3,
    *[Trouble.freeze_gateway] * 3,
    *[Trouble.kill_worker] * 2,
    *[Trouble.freeze_worker],
    *[Trouble.leave_gateway],
    *[Trouble.kill_redis],
]


async def freeze(process: Spoken, seconds: float) -> None:
    process.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)  # how long it is frozen
    finally:  # also where the minutes are over
        process.signal(signal.SIGCONT)


async def begin_gateway(chaos: Chaos, *way: str) -> GatewayProcess:
    log = chaos.directory / f"gateway-{len(chaos.clients)}.log"
    process = await GatewayProcess.start("gateway_process", log, *way)
    chaos.clients.append(process)
    await process.heard("port")
    return process


@scenario("gateways_die", lease_s=1.0, timeout_s=180.0)
async def gateways_die(chaos: Chaos) -> None:
    """Gateways are killed, freeze and leave, workers are killed and freeze, the server is killed. Each request with a
    key has one answer; each turn that was answered is in its session once, with the tokens that were answered."""
    faults = [*FAULTS]
    chaos.rng.shuffle(faults)
    await agents_go_on(chaos, lambda trouble: trouble.go_on(faults))


@scenario("gateways_die_for_minutes", lease_s=1.0, slow=True, lasts=True, timeout_s=180.0, finish_s=300.0)
async def gateways_die_for_minutes(chaos: Chaos) -> None:
    """The same, for minutes."""

    async def go_on(trouble: Trouble) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60 * chaos.minutes):
                while True:
                    await trouble.go_on([chaos.rng.choice(FAULTS)])

    await agents_go_on(chaos, go_on)


GATEWAY = {"admit", "settle", "begin_request", "finish_request", "record_turn", "recent_turns"}
GATEWAY |= {"take_session", "forget_session", "beat_gateway", "inherit_gateway", "leave_gateway"}
"""Scripts of gateways, and of whoever takes their sessions."""


@scenario("one_lost_reply_per_gateway_command", lease_s=2.0, timeout_s=180.0)
async def lost_gateway_replies(chaos: Chaos) -> None:
    """For each command of a gateway: it is executed, its reply is lost, the connection breaks, and it is sent again."""
    proxy, missed = await chaos.proxy(), list[str]()
    keys, _ = keys_file(chaos.directory, {"default": "requests_per_minute = 1_000_000"})
    kinds = sorted(GATEWAY)
    chaos.rng.shuffle(kinds)

    async def lose(trouble: Trouble) -> None:
        async with RolloutClient(proxy.url, POOL, client_id="reader") as reader:
            for kind in kinds:
                proxy.dropped = []
                proxy.drop_reply(f"EVALSHA {kind}")
                for fault in (trouble.leave_gateway, trouble.kill_gateway) * 3:
                    with contextlib.suppress(NoSuchSession):
                        await reader.take_session("nobody")
                    await reader.forget_session("nobody")
                    with contextlib.suppress(AssertionError):  # not yet
                        await until(lambda: proxy.dropped, 8 * ALIVE_S)
                        break
                    await fault()
                else:
                    missed.append(kind)

    await agents_go_on(chaos, lose, proxy.url, str(keys))
    chaos.notes["commands"] = len(kinds)
    chaos.expect(not missed, f"no reply of {missed} was there to be lost")


async def agents_go_on(chaos: Chaos, break_things: Callable[[Trouble], Awaitable[None]], *way: str) -> None:
    """Agents ask while things break, and then in peace. What they were answered is compared with what is recorded.

    way: what gateways are started with, the URL of Redis first.
    """
    workers = await chaos.start_workers(2, **WORKER)
    started = [*way] or [chaos.url]
    gateways = [await begin_gateway(chaos, *started) for _ in range(2)]
    trouble = Trouble(chaos, started, gateways, workers, random.Random(chaos.rng.random()))
    agents = [Agent(f"agent-{it}", gateways, random.Random(chaos.rng.random())) for it in range(AGENTS)]
    enough = asyncio.Event()
    asking = [asyncio.create_task(agent.go_on(enough)) for agent in agents]
    breaking = asyncio.create_task(_then(break_things(trouble), enough))
    await asyncio.gather(breaking, *asking)
    await judge(chaos, agents)
    chaos.notes |= {"faults": dict(trouble.count), **sum((agent.count for agent in agents), Counter[str]())}
    for gateway in gateways:
        gateway.signal(signal.SIGTERM)
    codes = [await gateway.ended(40) for gateway in gateways]
    chaos.expect(set(codes) == {0}, f"exit codes of the gateways: {codes}")
    names = {name for process in chaos.clients for name in process.all("client")}
    chaos.terms = replace(chaos.terms, giving_up=frozenset(names))  # what they were handed is in no journal


async def _then(work: Awaitable[None], enough: asyncio.Event) -> None:
    try:
        await work
    finally:
        enough.set()


async def judge(chaos: Chaos, agents: list[Agent]) -> None:
    """What is in the sessions of these agents, beside what they were answered."""
    unheard = 0
    async with RolloutClient(chaos.url, POOL, client_id="judge") as client:
        for agent in agents:
            for text in agent.trouble:
                chaos.expect(False, text)
            try:
                turns = (await client.take_session(agent.name)).turns
            except NoSuchSession:
                turns = ()
            for turn in turns:
                assert turn.prompt_ids is not None
                check_scripted(turn, len(turn.prompt_ids))
            found = Counter((tuple(it.prompt_ids.tolist()), tuple(it.token_ids.tolist())) for it in turns)
            wrong = [
                (prompt[:5], ids[:5], found[prompt, ids]) for prompt, ids in agent.turns if found[prompt, ids] != 1
            ]
            chaos.expect(not wrong, f"{agent.name}: answered turns that are not there once: {len(wrong)}, {wrong[:3]}")
            more = len(turns) - len(agent.turns)
            chaos.expect(0 <= more <= agent.loose, f"{agent.name}: {more} turns that nobody was answered")
            unheard += more
            await client.forget_session(agent.name)
    chaos.notes |= {"turns": sum(len(agent.turns) for agent in agents), "turns_nobody_heard": unheard}
    chaos.expect(all(agent.turns for agent in agents), "an agent was never answered")
