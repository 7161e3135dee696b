"""The trainer's weights on their way to the pool, for the server adapter and the checkpoint engine alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import torch

from ...sync.publish import WeightPublisher
from .settings import PoolSettings

Tell = Callable[[int, int | None], Awaitable[None]]
"""Tells the servers of all replicas which of the trainer's steps a version is from."""


class PoolWeights:
    """Publishes what verl's engines hand over, on every rank of the trainer.

    Guarantees: each call publishes one version, and returns when it is committed: requests that start then (with
    `max_staleness` 0) are sampled with it. The version of step s is s + 1 in a pool that had none before, and never one
    that the pool has had.

    Args:
        settings: which pool, and how to publish.
        leader: whether this rank sends. The others only take part in the gathers.
        tell: see `Tell`; it is called before the version is committed.
    """

    def __init__(self, settings: PoolSettings, *, leader: bool, tell: Tell) -> None:
        self._settings, self._leader, self._tell = settings, leader, tell
        self._publisher: WeightPublisher | None = None

    async def publish(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish (name, tensor) pairs under the checkpoint's names; returns verl's metrics of it.

        Raises WeightSyncError if no worker took the version, WaitTimeout if it is still on its way after
        `commit_timeout_s`, and InvalidField for unknown publisher settings.
        """
        if not self._leader:
            for _ in weights:  # each step of the generator is a gather of all ranks
                pass
            return {}
        publisher = self._open()
        version = max(publisher.last_version, global_steps or 0) + 1
        handle = publisher.publish(
            version, weights
        )  # here, not in a thread: the gathers belong to this thread's device
        await self._tell(version, global_steps)
        report = await asyncio.to_thread(handle.committed, self._settings.commit_timeout_s)
        return {"rolloutmq/version": float(version), "rolloutmq/workers": float(len(report.workers))}

    def close(self) -> None:
        """Finish what was published and disconnect."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _open(self) -> WeightPublisher:
        if self._publisher is None:
            settings = self._settings
            self._publisher = WeightPublisher(settings.redis_url, settings.pool, leader=True, **settings.publisher)
        return self._publisher
