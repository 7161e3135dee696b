"""The trainer's side of weight sync: `publish` copies, a thread does the rest, training goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

import torch

from ..messages.connection import connect, default_url, first_node_url, ping
from ..messages.errors import InvalidField, WaitTimeout, WeightSyncError
from ..messages.keys import Keys
from ..messages.weights import UpdateMode
from .group import own_address_towards
from .sender import Sender, Settings
from .snapshot import BUCKET_BYTES, PackedWeights

log = logging.getLogger(__name__)
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What became of one `publish`.

    state: "committed" (at least one worker serves it, or the pool is empty and later workers will catch up to it),
        "failed" (no worker has it), or "superseded" (a newer version was published before this one's turn came).
    workers: those that serve it. failures: worker id -> why it does not. seconds: from `publish` to the commit.
    """

    version: int
    state: Literal["committed", "failed", "superseded"]
    workers: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0


class PublishHandle:
    """A version on its way."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._future: Future[PublishReport] = Future()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> PublishReport:
        """The report, when there is one. Raises WaitTimeout, or WeightSyncError if the publisher itself broke."""
        try:
            return self._future.result(timeout_s)
        except FutureTimeout:
            raise WaitTimeout(f"version {self.version} is still on its way after {timeout_s} s") from None


@dataclass(slots=True)
class _Order:
    packed: PackedWeights
    handle: PublishHandle
    began: float


class WeightPublisher:
    """Publishes weights versions to a pool, and catches late joiners up with the newest one.

    Runs in the trainer (on rank 0 of a distributed one). It uses its own process groups and no environment variable of
    torchrun; the trainer's collectives are not touched.

    Guarantees: `publish` returns as soon as the tensors are copied; a worker serves a version only after every digest
    matched; versions commit in order; every wait inside is bounded by the two timeouts, whoever dies.

    Args:
        redis_url: the pool's Redis; by default $ROLLOUTMQ_REDIS, or the one on this host.
        pool: its name.
        host: this host as workers reach it; by default the address that the route to Redis leaves from.
        port: where the rendezvous store listens; 0 picks a free one.
        mode: "resume" interrupts running samples and continues them under the new weights, "drain" lets them finish.
        join_timeout_s: how long workers may take to answer an announcement (with "drain": to finish what runs).
        transfer_timeout_s: how long a transfer may take from the seal to the last report.
        bucket_bytes: size of one broadcast.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        pool: str = "default",
        *,
        host: str | None = None,
        port: int = 0,
        mode: UpdateMode = "resume",
        join_timeout_s: float = 10.0,
        transfer_timeout_s: float = 60.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if mode not in ("resume", "drain"):
            raise InvalidField("mode", mode, "'resume' or 'drain'")
        url = redis_url or default_url()
        Keys(pool)  # a bad pool name is told here, not in the thread
        self._bucket_bytes = bucket_bytes
        self._settings = Settings(
            redis_url=url,
            pool=pool,
            host=host or own_address_towards(first_node_url(url)),
            port=port,
            mode=mode,
            join_timeout_s=join_timeout_s,
            transfer_timeout_s=transfer_timeout_s,
        )
        self._lock = threading.Lock()
        self._last = 0
        self._next: _Order | None = None
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sender: Sender | None = None
        self._started: Future[int] = Future()
        self._thread = threading.Thread(target=self._main, name="rolloutmq-weights", daemon=True)
        self._thread.start()
        self._last = self._started.result()

    @property
    def last_version(self) -> int:
        """Newest version published or found in the pool's ledger; the next one has to be higher."""
        return self._last

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> PublishHandle:
        """Copy `tensors` and send them as `version`, in the background.

        tensors: (name, tensor) pairs under the names the model's checkpoint has (`model.named_parameters()` of a
            Hugging Face model), any device, any strided dtype. All of the model's weights, every time.
        version: higher than every one before.

        If an earlier version still waits for its turn it is given up as "superseded". Raises InvalidField, or
        WeightSyncError after `close`.
        """
        began = time.monotonic()
        if isinstance(version, bool) or not isinstance(version, int) or version <= self._last:
            raise InvalidField("version", version, f"an integer above {self._last}, the newest one")
        packed = PackedWeights(version, tensors, self._bucket_bytes)
        handle = PublishHandle(version)
        with self._lock:
            if self._closing:
                raise WeightSyncError("the publisher is closed")
            self._last = version
            skipped, self._next = self._next, _Order(packed, handle, began)
            self._poke()
        if skipped is not None:
            report = PublishReport(skipped.packed.version, "superseded", seconds=time.monotonic() - skipped.began)
            skipped.handle._future.set_result(report)
        return handle

    def close(self) -> None:
        """Finish what was published, then stop. Late joiners are not served any more."""
        with self._lock:
            self._closing = True
            self._poke()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _poke(self) -> None:
        if self._loop is not None and self._sender is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._sender.poke)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
                return
            log.exception("the weight publisher stopped")
            with self._lock:
                self._closing, order, self._next = True, self._next, None
            if order is not None:
                order.handle._future.set_exception(WeightSyncError(f"the weight publisher stopped: {error}"))

    async def _serve(self) -> None:
        url, pool = self._settings.redis_url, self._settings.pool
        redis, blocking = connect(url, pool=pool), connect(url, pool=pool, blocking=True)
        self._sender = sender = Sender(redis, blocking, self._settings)
        try:
            await ping(redis)
            self._loop = asyncio.get_running_loop()
            self._started.set_result(await sender.open())
            while True:
                await sender.wait_for_work(lambda: self._next is not None or self._closing)
                with self._lock:
                    order, self._next = self._next, None
                    closing = self._closing
                if order is not None:
                    await self._send(sender, order)
                elif closing:
                    return
                else:
                    await self._catch_up(sender)
        finally:
            self._sender = None
            await sender.close()
            await redis.aclose()
            await blocking.aclose()

    async def _catch_up(self, sender: Sender) -> None:
        try:
            await sender.catch_up()
        except Exception:
            log.exception("a late worker could not be caught up; it asks again")
            await asyncio.sleep(RETRY_S)

    async def _send(self, sender: Sender, order: _Order) -> None:
        try:
            snapshot = await asyncio.to_thread(order.packed.snapshot)
            result = await sender.send(snapshot)
        except Exception as error:
            order.handle._future.set_exception(WeightSyncError(f"version {order.packed.version}: {error}"))
            log.exception("version %s could not be sent", order.packed.version)
            return
        order.handle._future.set_result(
            PublishReport(
                version=snapshot.manifest.version,
                state="committed" if result.committed else "failed",
                workers=result.workers,
                failures=result.failures,
                nbytes=snapshot.manifest.nbytes,
                seconds=time.monotonic() - order.began,
            )
        )
