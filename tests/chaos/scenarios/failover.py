"""The primary dies while its replica is behind, and the replica is promoted by hand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace
from typing import Any

from rolloutmq.messages import Keys, connect
from rolloutmq.ops.redis.embedded import EmbeddedRedis

from .. import aof, ledger
from ..context import POOL, Chaos, Trainer, until
from ..host import HostRedis
from ..oracle import Terms, handed_out
from ..proxy import Proxy
from ..scenario import scenario
from .network import submit_until_accepted

PRIMARY = {"repl-diskless-sync-delay": "0"}
ONE_PAIR = "it fails over from one primary to its replica; every server of a pool would need one"
FROZEN_S = 0.5


@scenario("failover_with_wait", lease_s=2.0, config=PRIMARY, one_redis=ONE_PAIR)
async def with_wait(chaos: Chaos) -> None:
    """With `min_replicas=1` everything that was accepted or published has been on the replica: nothing is lost."""
    proxy = await chaos.proxy()
    url = f"{proxy.url}?min_replicas=1"
    pair = await make_replica(chaos)
    await chaos.start_workers(2, url, max_running=32, tokens_per_s=100)
    async with chaos.client(url) as trainer:
        await fail_over(chaos, proxy, trainer, pair)
        await trainer.take()


@scenario("failover_without_wait", lease_s=2.0, config=PRIMARY, one_redis=ONE_PAIR)
async def without_wait(chaos: Chaos) -> None:
    """Without it, what the replica had not seen is lost: `lost` counts the accepted jobs. All others end exactly once,
    and nothing is handed to the client twice."""
    proxy = await chaos.proxy()
    pair = await make_replica(chaos)
    await chaos.start_workers(2, proxy.url, max_running=32, tokens_per_s=100)
    async with chaos.client(proxy.url, patience=2 * chaos.lease_s + 2) as trainer:
        await fail_over(chaos, proxy, trainer, pair)
        chaos.terms = replace(chaos.terms, forgotten=True)
        await trainer.take()  # also of jobs that nobody knows any more
        chaos.notes["repeats_kept_back"] = trainer.client.repeats


async def make_replica(chaos: Chaos, name: str = "replica", clock_s: float = 0.0) -> tuple[EmbeddedRedis, Proxy]:
    """A replica of this scenario's server, in step with it, and the network between the two.

    clock_s: by how much its host's clock is off.
    """
    link = await chaos.proxy()
    settings = aof.SETTINGS | PRIMARY | {"replicaof": f"127.0.0.1 {link.ports[0]}"}
    (chaos.directory / name).mkdir()
    data = chaos.directory / name / "redis"
    replica: EmbeddedRedis
    if clock_s:
        replica = HostRedis(directory=data, appendonly=True, config=settings)
        replica.clock_s = clock_s
    else:
        replica = EmbeddedRedis(directory=data, appendonly=True, config=settings)
    await asyncio.to_thread(replica.start)
    chaos.ends_with(replica.stop)
    async with connect(replica.url) as db:
        await until(lambda: _in_step(db), what="the replica to be in step")
    return replica, link


async def _in_step(db: Any) -> bool:
    link, rewriting = (await db.info("replication"), await db.info("persistence"))
    return link["master_link_status"] == "up" and not rewriting["aof_rewrite_in_progress"]


async def fail_over(chaos: Chaos, proxy: Proxy, trainer: Trainer, pair: tuple[EmbeddedRedis, Proxy]) -> None:
    """The same under the load of a client, which goes on afterwards."""
    await trainer.submit(chaos.jobs(100, n=2, tokens=20))
    submitting = asyncio.create_task(_submit(chaos, trainer))
    await trainer.take_at_least(chaos.rng.randint(30, 80))
    at = await switch(chaos, proxy, pair, trainer)
    await trainer.take_at_least(1)
    chaos.recovered_s = time.monotonic() - at
    await submitting


async def switch(
    chaos: Chaos, proxy: Proxy, pair: tuple[EmbeddedRedis, Proxy], trainer: Trainer | None = None
) -> float:
    """The primary dies while its replica is behind; the replica is promoted, and gets a replica of its own.

    trainer: who takes outcomes meanwhile. Returns when the primary died, by this process's clock.
    """
    primary, log = chaos.redis, chaos.logs[0]
    replica, link = pair
    os.kill(replica.pid, signal.SIGSTOP)
    link.cut("down")  # what the kernel would keep for it is lost, too
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FROZEN_S):  # how long it falls behind
            await (trainer.take_at_least(10_000) if trainer else asyncio.Event().wait())
    proxy.refuse(True)
    primary.kill()
    at = time.monotonic()
    link.close_all()
    os.kill(replica.pid, signal.SIGCONT)
    async with connect(replica.url) as db:
        await db.execute_command("REPLICAOF", "NO", "ONE")
    chaos.terms = Terms(elsewhere=handed_out(ledger.tell(aof.read_commands(log), Keys(POOL).prefix)))
    chaos.servers, chaos.logs = [replica], [chaos.directory / "replica" / "redis"]
    proxy.repoint(replica.port)
    proxy.refuse(False)
    await make_replica(chaos, "next")  # who asks for a replica's word needs one again
    return at


async def _submit(chaos: Chaos, trainer: Trainer) -> None:
    for _ in range(60):
        await submit_until_accepted(trainer, chaos.jobs(4, n=chaos.rng.randint(1, 3), tokens=chaos.rng.randint(5, 40)))
        await asyncio.sleep(0.02)  # the pace of this trainer
