"""A run with four faults in it, which somebody who looks at the page, or at the report, should find.

The reward changes its sign after version 10; a snapshot on disk is damaged, and a worker comes to it; one host's worker
dies again and again; and jobs need what no worker has. Minutes are shortened to seconds.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.pools.late import publish, publisher
from support.pools.pool import eventually, worker
from support.pools.standstills import Able
from support.specimens.messages import tokens

from rolloutmq import GenerateJob, RolloutClient, SamplingParams
from rolloutmq.messages.journal import Journal
from rolloutmq.producer.control import PoolControl
from rolloutmq.worker.scripted.engine import ScriptedEngine

VERSIONS, FLIPPED, BATCH = 16, 10, 8
DEATHS = (3, 6, 9, 12)
"""After these versions a worker dies."""
SAMPLING = SamplingParams(max_new_tokens=16)
LONG = SamplingParams(max_new_tokens=2000)


@dataclass
class Planted:
    """What is left of the run: its journal, and who died."""

    journal: Path
    dead: list[str] = field(default_factory=list)
    late: str = ""
    asking: list[str] = field(default_factory=list)


def quick() -> ScriptedEngine:
    return ScriptedEngine(tokens_per_s=2000.0)


async def run_with_faults(url: str, folder: Path) -> Planted:
    """Run it on a real Redis, with real workers, clients and a publisher, all of which write one journal."""
    run, snapshots = Planted(folder / "journal"), folder / "snapshots"
    async with AsyncExitStack() as stack:
        settings: dict[str, Any] = {"journal": str(run.journal), "lease_s": 30.0, "drain_s": 1.0}
        for _ in range(2):
            await stack.enter_async_context(worker(url, engine=quick(), **settings))
        client = await stack.enter_async_context(RolloutClient(url, client_id="trainer", journal=run.journal))
        with Journal(run.journal) as journal:
            async with publisher(url, snapshots=snapshots, journal=journal) as source:
                for version in range(1, VERSIONS + 1):
                    assert (await publish(source, version)).state == "committed"
                    await _train(client, version)
                    if version in DEATHS:
                        await _die(url, client, settings, run)
                    if version == FLIPPED + 1:
                        await _ask_in_vain(url, client, settings, run)
                await eventually(lambda: newest(snapshots).name.endswith(f"{VERSIONS}"))
                await _late(url, snapshots, settings, run)
    return run


async def _train(client: RolloutClient, version: int) -> None:
    """A batch of samples, each with its reward: what was good is bad from FLIPPED on."""
    journal = client.journal
    assert journal is not None
    jobs = [GenerateJob(token_ids=[5, n], n=2, sampling=SAMPLING, min_version=version) for n in range(BATCH // 2)]
    for handle in await client.submit_many(jobs):
        for result in await client.wait(handle, timeout=60):
            reward = 0.8 + 0.05 * result.sample
            journal.note(result, trained=version, reward=reward if version <= FLIPPED else -reward)


async def _die(url: str, client: RolloutClient, settings: Any, run: Planted) -> None:
    """A worker comes, takes a long job, and is gone without a word."""
    async with worker(url, engine=ScriptedEngine(tokens_per_s=200.0), checkpoint_s=0.1, **settings) as running:
        await eventually(lambda: running.status.state == "serving")
        preferred = {"prefer_worker": running.id, "prefer_s": 60.0}
        jobs = [GenerateJob(token_ids=[9, n], n=2, sampling=LONG, **preferred) for n in range(2)]
        handles = await client.submit_many(jobs)
        await eventually(lambda: sum(running.sampled) > 50)
        await running.die()
        run.dead.append(running.id)
    for handle in handles:  # others take them again
        await client.wait(handle, timeout=60)


def newest(snapshots: Path) -> Path:
    """The folder of the newest version on disk."""
    return max(snapshots.glob("v*"), key=lambda one: one.name, default=snapshots)


def damage(snapshots: Path) -> None:
    """One bit of it."""
    (file,) = newest(snapshots).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


async def _late(url: str, snapshots: Path, settings: Any, run: Planted) -> None:
    """The newest snapshot is damaged; a worker that begins with it asks others instead."""
    damage(snapshots)
    async with worker(url, engine=quick(), snapshots=str(snapshots), **settings) as late:
        await eventually(lambda: late.status.version == VERSIONS, 60)
        run.late = late.id


async def _ask_in_vain(url: str, client: RolloutClient, settings: Any, run: Planted) -> None:
    """Jobs that only a worker could do that is gone."""
    async with worker(url, engine=Able("seed"), **settings) as able:
        async with PoolControl(url) as control:
            (await control.pause(worker_id=able.id)).check()
        run.asking += [(await client.submit(tokens(seed=n))).job_id for n in range(3)]
        # As when its process is gone: nothing more is noted, not even that its engine ends a moment before.
        able.worker._journal.worker = lambda *_, **__: None  # type: ignore[method-assign]
        await able.die()
