"""The trainer's side of weight sync: `publish` copies, a thread does the rest, and training continues."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

import torch

from ...messages import tracing
from ...messages.errors import InvalidField, WeightSyncError
from ...messages.journal import Entry, Journal
from ...messages.model import UpdateMode
from ...messages.redis import Keys, connect, default_url, first_node_url, ping
from ..adapters import format as adapter_format
from ..disk import SnapshotStore
from ..packing import PackedWeights, release_host_memory
from ..tensors import Places, Snapshot, side_stream
from ..transfer import Ledger, SyncOptions, SyncSettings
from ..wire import own_address_towards
from .again import insist
from .handle import Publication, PublishHandle, PublishProgress, PublishReport
from .saver import SnapshotSaver, store_of
from .sender import Sender

log = logging.getLogger(__name__)


class WeightPublisher:
    """Publishes weights versions to a pool, and sends the newest one to workers that join late.

    It runs in the trainer, on every rank of a distributed one. The leader sends, and the others help to gather sharded
    tensors. It uses process groups of its own, and no environment variable of torchrun. The trainer's groups are only
    used for gathers of DTensors inside `publish`.

    Guarantees: `publish` returns as soon as the tensors are copied (on a GPU: as soon as the copies are queued on the
    current stream). A worker serves a version only after every digest matched. Versions commit in order. Whoever dies,
    every wait inside ends by the two timeouts.

    Args:
        redis_url: the pool's Redis; by default $ROLLOUTMQ_REDIS, or the one on this host.
        pool: its name.
        rename: name of a tensor in the trainer -> its name in the checkpoint, or None to leave it out.
        leader: whether this rank sends; by default rank 0 of the trainer's default process group, or the only rank.
        snapshots: a folder (or a SnapshotStore) to save committed versions in. A version that waits to be saved is
            skipped when a newer one is committed. See `SyncSettings.snapshots`, and `snapshots_saved`.
        journal: where to write what became of each version; `RolloutClient.journal` will do.
        settings: fields of `SyncSettings`, which describes them.

    Raises InvalidField for a setting that is not allowed, RedisUnavailable, WeightSyncError if nothing can listen on
    `port`, and SnapshotError if the folder of `snapshots` cannot be made.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        pool: str = "default",
        *,
        rename: Callable[[str], str | None] | None = None,
        leader: bool | None = None,
        snapshots: str | Path | SnapshotStore | None = None,
        journal: Journal | None = None,
        **settings: Unpack[SyncOptions],
    ) -> None:
        self._settings = SyncSettings.build(**settings)
        self._url, self._pool, self._rename, self._journal = redis_url or default_url(), pool, rename, journal
        Keys(pool)  # a bad pool name is refused here, not in the thread
        self._leader = _leads() if leader is None else leader
        self._like: Places | None = None
        self._lock = threading.Lock()
        self._last = {"": 0}  # newest version: of the weights under "", of adapters under their names
        self._waiting: list[Publication] = []  # in order; of each name the newest, and those of a reproducible run
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sending: list[PublishHandle] = []
        self._sender: Sender | None = None
        self._started: Future[dict[str, int]] = Future()
        self._thread: threading.Thread | None = None
        self._saver: SnapshotSaver | None = None
        if self._leader:
            self._host = self._settings.host or own_address_towards(first_node_url(self._url))
        if self._leader and snapshots is not None:
            store = store_of(snapshots, self._settings.keep_snapshots)
            self._saver = SnapshotSaver(store, self._settings.snapshot_every)
        self._thread = threading.Thread(target=self._main, name="rolloutmq-weights", daemon=True)
        self._thread.start()
        try:
            self._last = self._started.result()
        except BaseException:
            if self._saver is not None:
                self._saver.close()
            raise

    @property
    def mode(self) -> UpdateMode:
        """What an update does with running samples; see `SyncSettings.mode`."""
        return self._settings.mode

    @property
    def renames(self) -> bool:
        """Whether a `rename` was given. Then the trainer's names differ from the checkpoint's."""
        return self._rename is not None

    @property
    def last_version(self) -> int:
        """Newest version that was published or found in the pool's ledger. The next one has to be higher."""
        return self._last[""]

    def last_adapter_version(self, name: str) -> int:
        """Newest version of an adapter published or found in the pool's ledger, or 0; the next one has to be higher."""
        return self._last.get(name, 0)

    @property
    def snapshots_saved(self) -> int:
        """Number of versions that this publisher has written to disk."""
        return self._saver.saved if self._saver is not None else 0

    @property
    def snapshots_failed(self) -> int:
        """Number of versions that it could not write. The log says why."""
        return self._saver.failed if self._saver is not None else 0

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
        *,
        after: Future[None] | None = None,
    ) -> PublishHandle:
        """Copy `tensors`, and send them as `version` in the background.

        tensors: (name, tensor) pairs with all of the model's weights, under the names of the model's checkpoint. That
        is
            `model.named_parameters()` of a Hugging Face model, through `unfuse_experts` if it is a mixture of experts;
            see also `rename`. They may be on any device, may be DTensors, and have dtypes that the engine takes (see
            `SyncSettings.dtype`). On a distributed trainer every rank calls it, with the same names in the same order.
        version: higher than every one before.
        after: of a reproducible run, `RolloutFeed.sampled(version)`. The version is announced when that is done; it
            comes in its turn, however many wait. A trainer that was killed publishes its versions under their numbers
            again: what the pool has had is not sent, and other tensors are an error.

        An earlier version that still waits for its turn is given up as "superseded". Raises InvalidField, or
        WeightSyncError after `close`.
        """
        began = time.monotonic()
        packed = PackedWeights(
            version,
            tensors,
            self._settings.bucket_bytes,
            keep=self._settings.keep,
            rename=self._rename,
            dtype=self._settings.dtype,
            leader=self._leader,
            like=self._like,
        )
        self._like = packed.places
        # Checked only now: only the leader knows the ledger's newest version, and the other ranks would wait in a
        # gather for a leader that raises before it.
        least = self._last[""] if after is None else 0
        if isinstance(version, bool) or not isinstance(version, int) or version <= least:
            raise InvalidField("version", version, f"an integer above {least}, the newest one")
        return self._queue(Publication(packed, PublishHandle(version, self._abort), began, after=after))

    def publish_adapter(
        self,
        name: str,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
    ) -> PublishHandle:
        """Copy a LoRA adapter, and send it as `version` of `name` in the background. It interrupts no request.

        tensors: as PEFT's get_peft_model_state_dict returns them: …lora_A.weight (r, inputs) and …lora_B.weight
            (outputs, r), on any device, DTensors too. On a distributed trainer every rank calls it.
        version: 1 or more, and higher than every earlier one of this adapter. It does not depend on the weights'
        versions. config: PEFT's adapter_config (r, lora_alpha, target_modules, …).

        Running requests keep the version that they began with. Jobs ask for the adapter by `lora=name`, once a version
        is committed. A version that waits for its turn is superseded by a newer one of the same adapter. Raises
        InvalidField, or WeightSyncError after `close`.
        """
        began = time.monotonic()
        name, packed, plain = adapter_format.pack(
            name,
            version,
            tensors,
            config,
            newest=self._last,
            bucket_bytes=self._settings.bucket_bytes,
            leader=self._leader,
        )
        return self._queue(Publication(packed, PublishHandle(version, self._abort), began, name, plain))

    def _queue(self, order: Publication) -> PublishHandle:
        """Let it wait for its turn, in the place of an older version of the same name that waits."""
        version, adapter, handle = order.packed.version, order.adapter, order.handle
        if not self._leader:
            self._last[adapter] = max(version, self._last.get(adapter, 0))
            handle._future.set_result(PublishReport(version, "delegated", adapter=adapter))
            return handle
        with self._lock:
            if self._closing:
                raise WeightSyncError("the publisher is closed")
            if self._journal is not None:
                handle._future.add_done_callback(partial(_note, self._journal, version, adapter))
            self._last[adapter] = max(version, self._last.get(adapter, 0))
            skipped = [it for it in self._waiting if it.adapter == adapter and it.after is None]
            self._waiting = [it for it in self._waiting if it not in skipped] + [order]
            self._poke()
        if order.after is not None:
            order.after.add_done_callback(lambda _: self._poke())
        for one in skipped:
            one.tell("superseded")
        return handle

    def _next(self) -> Publication | None:
        """Take the one whose turn it is: weights before adapters, and each name's in their order."""
        if self._closing:
            for late in [it for it in self._waiting if not it.may_begin]:
                self._waiting.remove(late)
                late.tell("aborted", failures={"trainer": "the publisher was closed before its turn"})
        firsts = {order.adapter: order for order in reversed(self._waiting)}
        ready = [order for order in self._waiting if order.may_begin and firsts[order.adapter] is order]
        chosen = min(ready, key=lambda it: it.adapter != "", default=None)
        if chosen is not None:
            self._waiting.remove(chosen)
        return chosen

    def _abort(self, handle: PublishHandle) -> None:
        with self._lock:
            waiting = [order for order in self._waiting if order.handle is handle]
            for order in waiting:
                self._waiting.remove(order)
        for order in waiting:
            order.tell("aborted", failures={"trainer": handle.aborted})
        loop, sender = self._loop, self._sender
        if not waiting and loop is not None and sender is not None and handle in self._sending:
            loop.call_soon_threadsafe(sender.stop, handle.version, handle.aborted)

    def close(self) -> None:
        """Finish what was published and what is being saved, then stop. Workers that join later get nothing from it."""
        with self._lock:
            self._closing = True
            self._poke()
        if self._thread is not None:
            self._thread.join()
        if self._saver is not None:
            self._saver.close()
        release_host_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _poke(self) -> None:
        alive = self._thread is not None and self._thread.is_alive()
        if self._loop is not None and self._sender is not None and alive:
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
                self._closing, orders, self._waiting = True, self._waiting, []
            for order in orders:
                order.handle._future.set_exception(WeightSyncError(f"the weight publisher stopped: {error}"))

    async def _serve(self) -> None:
        url, pool = self._url, self._pool
        redis, blocking = connect(url, pool=pool), connect(url, pool=pool, blocking=True)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(blocking.aclose)
            stack.push_async_callback(redis.aclose)
            await ping(redis)
            if not self._leader:  # it knows what the next version is, like the leader
                self._started.set_result(await Ledger(redis, pool).newest())
                return
            self._sender = sender = Sender(redis, blocking, pool, self._host, self._settings)
            stack.push_async_callback(sender.close)
            stack.callback(setattr, self, "_sender", None)
            self._loop = asyncio.get_running_loop()
            self._started.set_result(await sender.open())
            async with asyncio.TaskGroup() as tasks:  # each publication is followed while the next one begins
                while True:
                    await sender.until(
                        lambda: (self._closing or any(it.may_begin for it in self._waiting)) and sender.free
                    )
                    with self._lock:
                        order = self._next()
                        if order is None and not self._closing:
                            continue
                    if order is None:
                        return
                    begun = asyncio.Event()
                    tasks.create_task(self._send(sender, order, begun))
                    await begun.wait()

    async def _send(self, sender: Sender, order: Publication, begun: asyncio.Event) -> None:
        began = time.monotonic()
        self._sending.append(order.handle)
        try:
            await self._send_one(sender, order, begun)
        finally:
            begun.set()
            self._sending.remove(order.handle)
        tracing.past("rolloutmq publish weights", time.monotonic() - began, weights=order.name)

    async def _send_one(self, sender: Sender, order: Publication, begun: asyncio.Event) -> None:
        handle = order.handle
        handle._look, handle._hasten = lambda: PublishProgress("digesting"), sender.nudge
        try:
            snapshot = await asyncio.to_thread(_snapshot, order.packed)
            if not order.adapter:
                handle._look = partial(sender.progress, handle.version, snapshot.manifest.nbytes)
            if handle.aborted:
                report = order.report("aborted", failures={"trainer": handle.aborted}, nbytes=snapshot.manifest.nbytes)
            elif snapshot.nonfinite and self._settings.nonfinite == "refuse":
                count = len(snapshot.nonfinite)
                do = "1 tensor does" if count == 1 else f"{count} tensors do"
                why = f"tensor {snapshot.nonfinite[0]} has NaN or Inf in it ({do}); nonfinite='allow' sends it"
                log.error("%s is not sent: %s", order.name, why)
                report = order.report("failed", failures={"trainer": why}, nbytes=snapshot.manifest.nbytes)
            elif order.after is not None and order.after.cancelled():
                report = order.report("aborted", failures={"trainer": "what it waited for was given up"})
            else:
                report = await self._deliver(sender, snapshot, order, begun)
        except Exception as error:
            order.handle._future.set_exception(WeightSyncError(f"{order.name}: {error}"))
            log.exception("%s could not be sent", order.name)
            return
        if report.state == "committed" and self._saver is not None and not order.adapter:
            self._saver.offer(snapshot)
        handle._future.set_result(report)

    async def _deliver(
        self, sender: Sender, snapshot: Snapshot, order: Publication, begun: asyncio.Event
    ) -> PublishReport:
        if order.after is None:
            return await sender.send(snapshot, order, begun.set)

        async def send() -> PublishReport:
            if await sender.has_offered(snapshot):
                return order.report("committed", nbytes=snapshot.manifest.nbytes)
            return await sender.send(snapshot, order, begun.set)

        return await insist(send, order.name, lambda: self._closing or bool(order.handle.aborted))


def _note(journal: Journal, version: int, adapter: str, outcome: Future[PublishReport]) -> None:
    """Write into a journal what became of a version."""
    told: dict[str, Any] = {"adapter": adapter} if adapter else {}
    if (error := outcome.exception()) is not None:
        told = {"what": "failed", "failures": {"trainer": str(error)}} | told
    else:
        report = outcome.result()
        told = {"what": report.state, "seconds": report.seconds, "nbytes": report.nbytes} | told
        told |= {"workers": list(report.workers), "failures": dict(report.failures), "readback": report.readback}
    journal.add(Entry("weights", time.time(), versions=(version,), data=told))


def _snapshot(packed: PackedWeights) -> Snapshot:
    """Make the digests on a stream of their own, so that the trainer's stream does not wait."""
    with side_stream(packed.buckets[0].device):
        return packed.snapshot()


def _leads() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
