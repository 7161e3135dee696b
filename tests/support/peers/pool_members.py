"""Workers and trainers of a pool, each a process that fails where a test says."""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from support.peers import peer_process
from support.peers.peers import Forked

BUCKET_BYTES = 4096


def weights(version: int) -> dict[str, torch.Tensor]:
    """A version's tensors: several buckets."""
    base = torch.Generator().manual_seed(version)
    return {f"layer.{i}": torch.randn(40, 20 + i, generator=base) for i in range(6)}


class WorkerProcess(Forked):
    """A worker with the scripted engine. Points for a fault: announce, and those of peer_process.

    Its lease is long: a busy machine would make it lose a short one. A test ends the lease of one that it has stopped.
    """

    def __init__(self, url: str, **config: Any) -> None:
        super().__init__(worker_main, {"redis_url": url, "lease_s": 60.0, "drain_s": 3.0} | config)

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """id, version, in_service, quarantined, updating, starts, holds (at its fault), and its engine's digests."""
        self.say(status=True)
        answer = self.hear(timeout_s)
        assert answer is not None, "it does not answer"
        return dict(answer)

    def fault(self, at: str, how: str, number: int = 1) -> None:
        assert self.ask(fault={"at": at, "number": number, "how": how}) == "set"

    def let_go(self) -> None:
        """It goes on after a "hold"."""
        assert self.ask(go=True) == "gone on"


class TrainerProcess(Forked):
    """A trainer with a WeightPublisher. Points: offer, announce, join, serve, amid, done (one has it all), commit."""

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(trainer_main, {"redis_url": url, "bucket_bytes": BUCKET_BYTES} | settings)

    def fault(self, at: str, how: str, number: int = 1) -> None:
        assert self.ask(fault={"at": at, "number": number, "how": how}) == "set"

    def publish(self, version: int) -> None:
        self.say(publish=version)

    def report(self, timeout_s: float) -> Any:
        """Of the last `publish`: a PublishReport, or the exception; None if it is dead, stopped or not done."""
        return self.hear(timeout_s)


def worker_main(pipe: Connection, told: dict[str, Any]) -> None:
    """Serve until told to leave."""
    peer_process.end_with_parent()
    torch.set_num_threads(1)
    asyncio.run(_work(pipe, told))


async def _work(pipe: Connection, told: dict[str, Any]) -> None:
    from rolloutmq.sync.tensors.digester import digest  # noqa: PLC0415
    from rolloutmq.worker.config import WorkerConfig  # noqa: PLC0415
    from rolloutmq.worker.scripted.engine import ScriptedEngine  # noqa: PLC0415
    from rolloutmq.worker.text.tokenizer import NoTokenizer  # noqa: PLC0415
    from rolloutmq.worker.weights.follower import WeightFollower  # noqa: PLC0415
    from rolloutmq.worker.worker import Worker  # noqa: PLC0415

    fault = peer_process.Fault()
    peer_process.watch(fault)
    peer_process.watched(fault, WeightFollower, "_take_part", "announce")
    speed = told.pop("tokens_per_s", None)

    class Engine(ScriptedEngine):
        async def start(self) -> None:
            self.weights = {}  # as they come from disk
            await super().start()

    engine = Engine(tokens_per_s=speed)
    worker = Worker(WorkerConfig(**told), engine, NoTokenizer())

    def answer() -> None:
        try:
            question = pipe.recv()
        except EOFError:
            worker.drain()
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            return
        if "fault" in question:
            fault.set(**question["fault"])
            pipe.send("set")
        elif "go" in question:
            fault.free.set()
            pipe.send("gone on")
        elif "leave" in question:
            worker.drain()
        else:
            state = worker._generation.state
            pipe.send(
                {
                    "id": worker.worker_id if worker.joined.is_set() else "",
                    "version": state.version,
                    "in_service": state.in_service,
                    "quarantined": state.quarantined,
                    "updating": state.updating,
                    "starts": engine.starts,
                    "holds": fault.holds.is_set() and not fault.free.is_set(),
                    "digests": {name: digest(tensor) for name, tensor in engine.weights.items()},
                }
            )

    asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
    await worker.run()


def trainer_main(pipe: Connection, told: dict[str, Any]) -> None:
    """Publish what is asked for, until the pipe is closed."""
    from rolloutmq import WeightPublisher  # noqa: PLC0415
    from rolloutmq.sync.publish.hub import Hub  # noqa: PLC0415
    from rolloutmq.sync.transfer.ledger import Ledger  # noqa: PLC0415
    from rolloutmq.sync.wire.relay_tree import RelayTree  # noqa: PLC0415

    peer_process.end_with_parent()
    torch.set_num_threads(1)
    fault = peer_process.Fault()
    peer_process.watched(fault, Hub, "offer", "offer")
    peer_process.watched(fault, Ledger, "announce", "announce")
    peer_process.watched(fault, Hub, "_join", "join")
    peer_process.watched(fault, RelayTree, "done", "done")
    peer_process.watched(fault, Ledger, "close", "commit")
    peer_process.watch_sender(fault)
    url, until = told.pop("redis_url"), time.monotonic() + 20.0
    publisher = None
    while publisher is None:
        try:
            publisher = WeightPublisher(url, **told)
        except RuntimeError:  # the port of one who died a moment ago
            if time.monotonic() > until:
                raise
    pipe.send(publisher.last_version)
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            publisher.close()
            return
        if "fault" in question:
            fault.set(**question["fault"])
            pipe.send("set")
        else:
            version = question["publish"]
            try:
                pipe.send(publisher.publish(version, weights(version)).wait(60))
            except Exception as error:
                pipe.send(error)
