"""The same publication with real receivers in processes, whose links are throttled: the check of the simulation."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from dataclasses import asdict
from typing import Any

import torch

from rolloutmq.sync.packing import PackedWeights
from rolloutmq.sync.publish.hub import Hub
from rolloutmq.sync.receive import Receiver
from rolloutmq.sync.transfer import TransferOrder
from rolloutmq.sync.wire import Talk

from .pool import weights
from .simulated import Publication

RECEIVERS, BUCKETS, NBYTES, LINK = 16, 32, 1 << 20, 24e6
VERIFY = 1.5e9
"""Bytes a second that a core digests here, about."""
ROUNDS = 5
LONGEST_S = 120.0
_start = multiprocessing.get_context("forkserver")


def measure() -> dict[str, Any]:
    """Seconds until all have it, real and simulated, medians of ROUNDS."""
    unthrottled = Talk.say_bucket
    _throttle()
    changed = threading.Event()
    hub = Hub("127.0.0.1", 0, changed.set, gpu_direct=False, timeout_s=LONGEST_S)
    pipes, processes = [], []
    for _ in range(RECEIVERS):
        ours, theirs = _start.Pipe()
        processes.append(_start.Process(target=_receive, args=(theirs,), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    real = [_round(hub, pipes, number) for number in range(1, ROUNDS + 2)][1:]  # the first one sets everything up
    for process in processes:
        process.kill()
    hub.close()
    Talk.say_bucket = unthrottled  # type: ignore[method-assign]  # other parts follow in this process
    dice = random.Random(1)
    made = [
        Publication(RECEIVERS, BUCKETS, NBYTES, link=LINK, verify=VERIFY, deaths=[], dice=dice, join_s=0.02).run()
        for _ in range(ROUNDS)
    ]
    ours, theirs = sorted(real)[ROUNDS // 2], sorted(max(one.values()) for one in made)[ROUNDS // 2]
    return {
        "receivers": RECEIVERS, "MB": BUCKETS * NBYTES / 1e6, "link_MB_s": LINK / 1e6, "rounds": ROUNDS,
        "real_s": round(ours, 3), "simulated_s": round(theirs, 3), "simulated_of_real": round(theirs / ours, 3),
    }  # fmt: skip


def _round(hub: Hub, pipes: list[Any], version: int) -> float:
    snapshot = PackedWeights(version, weights(version, BUCKETS, NBYTES), NBYTES).snapshot()
    outgoing = hub.offer(snapshot, frozenset(f"w{number}" for number in range(RECEIVERS)))
    order = TransferOrder(version, version, hub.address, outgoing.token, "", "", LONGEST_S)
    began = time.monotonic()
    for number, pipe in enumerate(pipes):
        pipe.send(asdict(order) | {"worker": f"w{number}"})
    reports = [pipe.recv() for pipe in pipes]
    hub.withdraw(outgoing, "the round is over")
    if any(report["error"] for report in reports):
        raise SystemExit(f"a receiver failed: {reports}")
    return max(report["at"] for report in reports) - began


def _throttle() -> None:
    """Send one bucket after the other from this process, at the rate of LINK."""
    turn, say = threading.Lock(), Talk.say_bucket

    def slowly(talk: Talk, nbytes: int, pieces: Any) -> None:
        with turn:
            began = time.monotonic()
            say(talk, nbytes, pieces)
            time.sleep(max(0.0, began + nbytes / LINK - time.monotonic()))

    Talk.say_bucket = slowly  # type: ignore[method-assign]


def _receive(pipe: Any) -> None:
    torch.set_num_threads(1)
    _throttle()
    receiver = Receiver(torch.device("cpu"), recorded=False)
    pipe.send("up")
    while True:
        report = receiver.prepare(TransferOrder.from_dict(pipe.recv()))
        pipe.send({"error": report.error, "at": time.monotonic()})
