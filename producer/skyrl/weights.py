"""Weights from a trainer to the whole pool: collected tensor by tensor, published as one version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...messages.errors import InvalidField, RedisUnavailable, WeightSyncError
from ...sync.transfer import Ledger
from ..client import RolloutClient
from .control import WorkerControl
from .core import EngineCore, positive_seconds
from .incoming import Shapes, StagedTensors, Update, read_adapter_request, read_group, read_update

if TYPE_CHECKING:  # torch
    from ...sync.publish import PublishHandle, PublishReport, WeightPublisher
    from .incoming.receive import ReceivingGroup

log = logging.getLogger(__name__)
OK = (True, "")
"""The answer of SkyRL's engines for a request that succeeded."""
ADAPTER = "skyrl-lora"
"""The name of the adapter that SkyRL trains, if it does not name it."""
MODE_OF = {"in_place": "in_place", "retract": "resume", "abort": None}
"""Pause mode of `overlapped_weight_sync` -> the publisher's mode that it needs, None for any."""


class WeightTransferHandle:
    """A version on its way to the pool, as `start_weight_transfer` returns it."""

    def __init__(self, task: asyncio.Task[str]) -> None:
        self._task = task
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # only `wait` raises the error

    async def wait(self) -> str:
        """Wait until the pool serves the version, and return it. May be called again. Raises the transfer's error."""
        return await asyncio.shield(self._task)

    @property
    def is_complete(self) -> bool:
        """Whether the transfer has ended. `wait` then returns or raises at once."""
        return self._task.done()

    @property
    def error(self) -> BaseException | None:
        """The error of a failed transfer, otherwise None."""
        if not self._task.done():
            return None
        return asyncio.CancelledError() if self._task.cancelled() else self._task.exception()


class WeightSync:
    """SkyRLEngine documents the methods without a docstring.

    adapters: the adapters that this engine has published. adapter: the one that SkyRL sent last to be sampled with, and
    the default of later calls.
    turn: the lock of whoever receives or publishes. Broadcasts have an order, so requests come one at a time.
    """

    def __init__(
        self,
        core: EngineCore,
        control: WorkerControl,
        publisher: WeightPublisher | None,
        *,
        ranks: int | None,
        device: str,
        timeout_s: float,
    ) -> None:
        positive_seconds("weights_timeout_s", timeout_s)
        if ranks is not None and ranks < 1:
            raise InvalidField("receiver_ranks", ranks, "at least 1")
        self._core, self._control, self._timeout_s = core, control, timeout_s
        self._publisher, self._own_publisher = publisher, False
        self._ranks, self._device = ranks, device
        self._staged = StagedTensors()
        self.adapters: set[str] = set()
        self.adapter: str | None = None
        self._group: ReceivingGroup | None = None
        self._renew()
        core.when_loop_changes.append(self._renew)

    def _renew(self) -> None:
        self.turn, self._making = asyncio.Lock(), asyncio.Lock()

    # --- receiving -------------------------------------------------------------------------------------------------

    async def join(self, *group: Any) -> tuple[bool, str]:
        """Join the trainer's group, if it has one. group: the arguments of `read_group`."""
        await self._core.client()
        if (info := read_group(*group)) is None:
            return OK
        from .incoming.receive import ReceivingGroup  # noqa: PLC0415 – torch

        async with self.turn:
            if self._group is not None and self._group.name == info.name and not info.override_existing:
                raise InvalidField("group_name", info.name, "another name, or override_existing=True")
            self._leave()
            last = info.rank_offset + (self._ranks or info.world_size - info.rank_offset)
            ranks = range(info.rank_offset, last)
            self._group = await asyncio.to_thread(
                ReceivingGroup, info, ranks, device=self._device, timeout_s=self._timeout_s
            )
        return OK

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    async def update(self, request: Any) -> tuple[bool, str]:
        if (lora := read_adapter_request(request)) is not None:
            name, path = lora[0] or ADAPTER, lora[1]
            await self.load_adapter(name, path)
            self.adapter = name
            return OK
        update = read_update(request)
        await self._core.client()
        if self._staged.begins_anew(update):
            await self.end_sync()
        async with self.turn:
            await self._receive(update)
        return OK

    async def _receive(self, update: Update) -> None:
        from .incoming.receive import received  # noqa: PLC0415 – torch

        try:
            # A cancelled task leaves its thread in the broadcast. Then the group cannot be used any more.
            tensors = await asyncio.to_thread(received, update, self._group, self._device, self._timeout_s)
        except BaseException:
            if update.way == "broadcast":
                self._leave()
            self._staged.take()
            raise
        self._staged.tensors.update(tensors)

    # --- publishing ------------------------------------------------------------------------------------------------

    async def end_sync(self) -> None:
        """Publish the received tensors as one version, and wait until the pool serves it. No-op without tensors.

        Raises IncompleteWeights before it announces anything, and WeightSyncError if no worker took the version.
        """
        if not self._staged:  # nearly always
            return
        async with self.turn:
            if self._staged:
                async with self._control.thawed():
                    await self._served(*await self._publish())

    async def _publish(self) -> tuple[PublishHandle, Shapes]:
        """Give the received tensors to the publisher. Returns their shapes too. The caller holds `turn`."""
        publisher = await self._opened_publisher()
        checkpoint = await self._checkpoint(publisher)
        tensors = self._staged.take()  # not before: whoever is cut off until here has lost nothing
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._staged.check(shapes, checkpoint)
        version = self._next_version(publisher)
        return await asyncio.to_thread(publisher.publish, version, tensors), shapes

    def _next_version(self, publisher: WeightPublisher) -> int:
        """The number that `update_weight_version` gave to the next version, or else the next number."""
        staged = self._staged
        version = publisher.last_version + 1 if staged.version is None else staged.version
        self._core.versions.give(version, staged.name)
        staged.version, staged.name = None, ""
        return version

    async def _served(self, handle: PublishHandle, shapes: Shapes | None = None) -> str:
        """Wait until the pool serves the version, and return it. Raises WeightSyncError if no worker took it.

        shapes: the version's tensors. Once a worker has accepted them they are known as complete, and not before: a
        later sync is compared with them. None for a version that did not come from the trainer.
        """
        report: PublishReport = await asyncio.to_thread(handle.wait)  # bounded by the publisher's own timeouts
        if report.state in {"failed", "aborted"}:
            why = _reasons(report.failures) or report.state
            raise WeightSyncError(f"version {report.version} is served by nobody: {why}")
        for worker, reason in sorted(report.failures.items()):
            log.warning("worker %s has not taken version %d: %s", worker, report.version, reason)
        if report.workers:
            self._staged.known = shapes
        return self._core.versions.text(report.version)

    async def _opened_publisher(self) -> WeightPublisher:
        async with self._making:
            if self._publisher is None:
                from ...sync.publish import WeightPublisher  # noqa: PLC0415 – torch

                # In place, as in SGLang's own update: samples that pause_generation halted go on where they were.
                self._publisher = await asyncio.to_thread(
                    lambda: WeightPublisher(self._core.redis_url, self._core.pool, mode="in_place", leader=True)
                )
                self._own_publisher = True
            return self._publisher

    async def _checkpoint(self, publisher: WeightPublisher) -> Shapes:
        """The tensors of the model's checkpoint. Empty if it is not on this host or the trainer's names differ."""
        if publisher.renames:
            return {}
        from ...sync.disk.checkpoint import checkpoint_shapes  # noqa: PLC0415 – torch

        models = {worker.model for worker in await self._core.workers(fresh=False) if worker.model}
        if len(models) != 1:
            return {}
        return await asyncio.to_thread(checkpoint_shapes, models.pop())

    async def _ledger(self) -> Ledger:
        return Ledger((await self._core.client()).broker.redis, self._core.pool)

    async def version(self) -> str | None:
        return self._core.versions.text(await (await self._ledger()).committed())

    async def name_version(self, new_version: str | int, end_calls: bool) -> tuple[bool, str]:
        publisher = await self._opened_publisher()
        version, name = self._core.versions.number("new_version", new_version, publisher.last_version + 1)
        if version == publisher.last_version and not self._staged:
            return OK
        if version <= publisher.last_version:
            newest = f"{publisher.last_version}, the newest one"
            raise InvalidField("new_version", new_version, f"a number above {newest}, or a name that no version has")
        self._staged.version, self._staged.name = version, name
        if self._staged:
            if end_calls:
                await self._control.end_calls()
            await self.end_sync()
        return OK

    # --- overlapped ------------------------------------------------------------------------------------------------

    async def start(self, request: Any) -> WeightTransferHandle:
        update = read_update(request)
        self._control.check_takes_weights("start_weight_transfer")
        await self._core.client()
        return WeightTransferHandle(asyncio.create_task(self._transfer(update)))

    async def _transfer(self, update: Update) -> str:
        async with self.turn:
            await self._receive(update)
            published = await self._publish()
        return await self._served(*published)

    async def overlapped(self, request: Any, pause_mode: str) -> str:
        if pause_mode not in MODE_OF:
            raise InvalidField("pause_mode", pause_mode, f"one of {', '.join(MODE_OF)}")
        publisher, needed = await self._opened_publisher(), MODE_OF[pause_mode]
        if needed not in (None, publisher.mode):
            why = f"'abort', unless the publisher has mode={needed!r}, not {publisher.mode!r}"
            raise InvalidField("pause_mode", pause_mode, why)
        if pause_mode == "abort":
            await self._control.end_calls()
        return await (await self.start(request)).wait()

    # --- folders ---------------------------------------------------------------------------------------------------

    async def load_folder(self, path: str) -> tuple[bool, str]:
        self._control.check_takes_weights("load_weights_from_disk")
        await self._core.client()
        async with self.turn:
            publisher = await self._opened_publisher()
            folder, version = await asyncio.to_thread(_folder, Path(path)), self._next_version(publisher)
            await self._served(await asyncio.to_thread(_publish_folder, publisher, folder, version))
            self._staged.take()  # the folder's weights have replaced them
        await self._control.flush_caches()
        return OK

    async def load_adapter(self, name: str, path: str, pinned: bool = False) -> tuple[bool, str]:
        from ...sync.adapters import PINNED, read_adapter  # noqa: PLC0415 – torch

        ledger, publisher = await self._ledger(), await self._opened_publisher()
        version = (await ledger.newest()).get(name, 0) + 1
        adapter = await asyncio.to_thread(read_adapter, Path(path), name, version)
        config: Any = adapter.config | ({PINNED: True} if pinned else {})
        handle = await asyncio.to_thread(publisher.publish_adapter, name, version, adapter.tensors, config)
        await asyncio.to_thread(handle.committed)
        self.adapters.add(name)
        return OK

    async def unload_adapter(self, name: str) -> tuple[bool, str]:
        await self._control.ask("unload_adapter", {"name": name})
        self.adapters.discard(name)
        if self.adapter == name:
            self.adapter = None
        return OK

    async def close(self) -> None:
        """Leave the trainer's group, and close the publisher if it is the engine's own."""
        self._leave()
        if dropped := self._staged.take():
            log.warning("%d tensors were received and never published", len(dropped))
        if self._publisher is not None and self._own_publisher:
            publisher, self._publisher = self._publisher, None
            await asyncio.to_thread(publisher.close)


def _reasons(failures: Mapping[str, str]) -> str:
    return "; ".join(f"{worker}: {reason}" for worker, reason in sorted(failures.items()))


def _folder(path: Path) -> Path:
    """The folder, if it has weights. Raises InvalidField, SnapshotError."""
    from ...sync.disk.checkpoint import checkpoint_format  # noqa: PLC0415 – torch

    found = checkpoint_format(path)
    if found not in ("safetensors", "snapshot"):
        raise InvalidField("model_path", str(path), f"a checkpoint or one version of a snapshot folder, not {found}")
    return path


def _publish_folder(publisher: WeightPublisher, path: Path, version: int) -> PublishHandle:
    from ...sync.receive import open_version  # noqa: PLC0415 – torch

    with open_version(str(path), version) as opened:
        return publisher.publish(version, ((spec.name, flat) for spec, flat in opened))


async def remote_version(redis_url: str, pool: str, timeout: float) -> str:
    """See SkyRLEngine.get_remote_weight_version."""
    client = RolloutClient(redis_url, pool)
    try:
        async with asyncio.timeout(timeout):
            await client.open()
            return str(await Ledger(client.broker.redis, pool).committed())
    except TimeoutError:
        raise RedisUnavailable(f"no answer from {pool!r} in {timeout:g} s") from None
    finally:
        await client.aclose()
