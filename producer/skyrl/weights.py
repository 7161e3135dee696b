"""Weights from a SkyRL trainer to the whole pool: collected as they come, published as one version at the end."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ...messages.errors import InvalidField, WeightSyncError
from ...sync.transfer import Ledger
from .control import ControlMethods
from .staging import Shapes, Staging
from .transfer_handle import WeightTransferHandle
from .updates import Update, read_update

if TYPE_CHECKING:
    from ...sync.publish import WeightPublisher
    from ...sync.publish.handle import PublishHandle, PublishReport
    from .receive import ReceivingGroup

log = logging.getLogger(__name__)
PAUSE_MODES = ("in_place", "retract", "abort")


class WeightMethods(ControlMethods):
    """See SkyRLEngine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._staging = Staging()
        self._group: ReceivingGroup | None = None
        self._sync_turn, self._making = asyncio.Lock(), asyncio.Lock()

    def _new_loop(self) -> None:
        super()._new_loop()
        self._sync_turn, self._making = asyncio.Lock(), asyncio.Lock()

    # --- joining the trainer's group -------------------------------------------------------------------------------

    async def init_weight_update_communicator(  # noqa: PLR0917 – SkyRL's signature
        self,
        init_info: Any = None,
        master_port: int | None = None,
        rank_offset: int = 1,
        world_size: int = 2,
        group_name: str = "skyrl",
        backend: str = "gloo",
        override_existing: bool = False,
        *,
        master_addr: str | None = None,
    ) -> tuple[bool, str]:
        """Join the trainer's broadcast group as ranks `rank_offset` and following, in this process.

        init_info: SkyRL's BroadcastInitInfo or CudaIpcInitInfo (nothing is joined for that one), or the address, with
            the other arguments behind it. How many ranks are filled says the engine's `receiver_ranks`; by default all
            that there are. NCCL needs a GPU of its own for this process (`receiver_device`).
        Returns (True, ""). Raises InvalidField, ConfigError, TransferTimeout if not everybody comes in time.
        """
        await self.client()
        told = _group_of(init_info, master_addr, (master_port, rank_offset, world_size, group_name, backend))
        if told is None:
            return True, ""
        override = override_existing or bool(getattr(init_info, "override_existing_receiver", False))
        from .receive import ReceivingGroup  # noqa: PLC0415 – torch

        async with self._sync_turn:
            if self._group is not None:
                if self._group.name == told["name"] and not override:
                    raise InvalidField("group_name", told["name"], "another name, or override_existing=True")
                self._group.abort()
                self._group = None
            count = self._receiver_ranks or told["world"] - told["offset"]
            self._group = await asyncio.to_thread(
                ReceivingGroup,
                told["address"],
                told["port"],
                told["name"],
                backend=told["backend"],
                ranks=range(told["offset"], told["offset"] + count),
                world=told["world"],
                device=self._receiver_device,
                timeout_s=self.weights_timeout_s,
            )
        return True, ""

    # --- tensors ---------------------------------------------------------------------------------------------------

    async def update_named_weights(self, request: Any) -> tuple[bool, str]:
        """Take some of a version's tensors, or all: given in the request, by CUDA IPC, or broadcast in the group.

        They are kept until the sync ends, and then published as one version: at `update_weight_version`,
        `continue_generation`, `reset_prefix_cache`, `wake_up` or the next `generate`, whichever comes first. A tensor
        that comes a second time ends it, too. Returns (True, ""). Raises InvalidField, TransferTimeout.
        """
        update = read_update(request)
        await self.client()
        if self._staging.begins_anew(update):
            await self.end_sync()
        async with self._sync_turn:
            await self._stage(update)
        return True, ""

    async def update_named_weight(self, request: Any) -> tuple[bool, str]:
        """The same for one tensor, in the older form: {"name", "dtype", "shape", "extras"}."""
        return await self.update_named_weights(request)

    async def _stage(self, update: Update) -> None:
        from .receive import staged  # noqa: PLC0415 – torch

        try:
            # A task that is cancelled leaves its thread in the broadcast: the group cannot be used any more then.
            tensors = await asyncio.to_thread(
                staged, update, self._group, self._receiver_device, self.weights_timeout_s
            )
        except BaseException:
            if update.way == "broadcast" and self._group is not None:
                self._group.abort()
                self._group = None
            self._staging.take()
            raise
        self._staging.tensors.update(tensors)

    # --- versions --------------------------------------------------------------------------------------------------

    async def end_sync(self) -> str | None:
        """Publish what has come as one version and wait until the pool serves it; returns it, None if nothing had come.

        Raises IncompleteWeights before anything is announced, WeightSyncError if no worker has it afterwards.
        """
        if not self._staging:  # nearly always
            return None
        async with self._sync_turn:
            if not self._staging:
                return None
            frozen = self._halted == "in_place"  # and takes no weights: they change under what runs
            if frozen:
                await self.resume_workers()
            try:
                return await self._settled(await self._publish())
            finally:
                if frozen:
                    await self.pause_workers("in_place")

    async def _publish(self) -> PublishHandle:
        """Hand what has come to the publisher; holds `_sync_turn`."""
        tensors = self._staging.take()
        publisher = await self._weight_publisher()
        self._staging.check(tensors, await self._checkpoint(publisher))
        version, self._staging.version = self._staging.version, None
        if version is None:
            version = publisher.last_version + 1
        handle = await asyncio.to_thread(publisher.publish, version, tensors)
        self._staging.remember(tensors)
        return handle

    async def _settled(self, handle: PublishHandle) -> str:
        report: PublishReport = await asyncio.to_thread(handle.wait)  # bounded by the publisher's own timeouts
        if report.state in {"failed", "aborted"}:
            why = "; ".join(f"{worker}: {reason}" for worker, reason in sorted(report.failures.items()))
            raise WeightSyncError(f"version {report.version} is served by nobody: {why or report.state}")
        for worker, reason in sorted(report.failures.items()):
            log.warning("worker %s has not taken version %d: %s", worker, report.version, reason)
        return str(report.version)

    async def _weight_publisher(self) -> WeightPublisher:
        async with self._making:
            if self._publisher is None:
                from ...sync.publish import WeightPublisher  # noqa: PLC0415 – torch

                # In place, as SGLang's own update is: what pause_generation left where it was goes on from there.
                self._publisher = await asyncio.to_thread(
                    lambda: WeightPublisher(self.redis_url, self.pool, mode="in_place", leader=True)
                )
                self._own_publisher = True
            return self._publisher

    async def _checkpoint(self, publisher: WeightPublisher) -> Shapes:
        """What the model's checkpoint has, if it is on this host and the trainer's names are the checkpoint's."""
        if getattr(publisher, "_rename", None) is not None:
            return {}
        from ...sync.receive import checkpoint_shapes  # noqa: PLC0415 – torch

        models = {worker.model for worker in await self.workers(fresh=False) if worker.model}
        if len(models) != 1:
            return {}
        shapes: Shapes = await asyncio.to_thread(checkpoint_shapes, models.pop())
        return shapes

    async def get_weight_version(self) -> str | None:
        """The pool's newest version that is served, as text; "0" is the model as the workers loaded it from disk."""
        client = await self.client()
        return str(await Ledger(client.broker.redis, self.pool).committed())

    async def update_weight_version(self, new_version: str | int, abort_all_requests: bool = True) -> tuple[bool, str]:
        """End the sync and publish it as `new_version`. With nothing to publish, the next sync gets that number.

        new_version: a number above all before, as text too. The one that is published already changes nothing.
        abort_all_requests: what generates is ended first (see `abort_generation`); else it goes on, and its tokens say
            which version sampled them. Raises InvalidField, IncompleteWeights, WeightSyncError.
        """
        version = _number("new_version", new_version)
        publisher = await self._weight_publisher()
        if version == publisher.last_version and not self._staging:
            return True, ""
        if version <= publisher.last_version:
            raise InvalidField("new_version", new_version, f"a number above {publisher.last_version}, the newest one")
        self._staging.version = version
        if self._staging:
            if abort_all_requests:
                await self.stop_calls()
            await self.end_sync()
        return True, ""

    # --- overlapped ------------------------------------------------------------------------------------------------

    def supports_overlapped_weight_sync(self) -> bool:
        """True: workers serve the old version while the new one arrives."""
        return True

    async def start_weight_transfer(self, request: Any) -> WeightTransferHandle:
        """Take the tensors of a request and publish them, with those that had come before, in the background.

        They are all that the version has. Returns at once. Raises InvalidField.
        """
        update = read_update(request)
        await self.client()
        return WeightTransferHandle(request, asyncio.create_task(self._transfer(update)))

    async def _transfer(self, update: Update) -> str:
        async with self._sync_turn:
            await self._stage(update)
            handle = await self._publish()
        return await self._settled(handle)

    async def finish_weight_transfer(self, handle: WeightTransferHandle, flush_cache: bool = True) -> str:
        """Wait until the pool serves it; returns the version. flush_cache: drop cached prefixes, too - those of other
        versions are never used. Raises what became of it: IncompleteWeights, WeightSyncError, …"""
        version = await handle.wait()
        if flush_cache:
            await self.flush_caches()
        return version

    async def overlapped_weight_sync(self, request: Any, pause_mode: str = "in_place") -> str:
        """Both, one after the other: what generates goes on, and its tokens say which version sampled them.

        pause_mode: what happens to it when the weights change. "in_place": they change under it; "retract": it is
        continued under the new ones, its cache computed anew; "abort": it ends. How running samples cross an update is
        the publisher's `mode`, which has to be "in_place" or "resume" accordingly. Raises InvalidField.
        """
        if pause_mode not in PAUSE_MODES:
            raise InvalidField("pause_mode", pause_mode, f"one of {', '.join(PAUSE_MODES)}")
        publisher = await self._weight_publisher()
        needed = {"in_place": "in_place", "retract": "resume"}.get(pause_mode)
        mode = getattr(getattr(publisher, "_settings", None), "mode", needed)
        if needed is not None and mode != needed:
            raise InvalidField(
                "pause_mode", pause_mode, f"'abort', unless the publisher has mode={needed!r}, not {mode!r}"
            )
        if pause_mode == "abort":
            await self.stop_calls()
        return await self.finish_weight_transfer(await self.start_weight_transfer(request), flush_cache=False)

    async def close_weights(self) -> None:
        """Leave the trainer's group; end the publisher if it is the engine's own."""
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._staging.take()
        if self._publisher is not None and self._own_publisher:
            publisher, self._publisher = self._publisher, None
            await asyncio.to_thread(publisher.close)


def _number(field: str, value: Any) -> int:
    text = str(value)
    if isinstance(value, bool) or not isinstance(value, str | int) or not text.isdecimal() or int(text) < 1:
        raise InvalidField(field, value, "a whole number, 1 or more, as text or number: versions are ordered here")
    return int(text)


def _group_of(init_info: Any, address: Any, rest: tuple[Any, int, int, str, str]) -> dict[str, Any] | None:
    """The group to join, of either form of the arguments; None for CUDA IPC, which has none."""
    port, offset, world, name, backend = rest
    if init_info is not None and not isinstance(init_info, str):
        if not hasattr(init_info, "master_addr"):
            if hasattr(init_info, "model_dtype_str") or "Ipc" in type(init_info).__name__:
                return None
            raise InvalidField("init_info", init_info, "SkyRL's BroadcastInitInfo or CudaIpcInitInfo, or an address")
        address, port, offset = init_info.master_addr, init_info.master_port, init_info.rank_offset
        world, name, backend = init_info.world_size, init_info.group_name, init_info.backend
    address = address or init_info
    if not isinstance(address, str) or not address:
        raise InvalidField("master_addr", address, "an address")
    for field, value, least in (("master_port", port, 1), ("rank_offset", offset, 1), ("world_size", world, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidField(field, value, f"a whole number, at least {least}")
    if offset >= world:
        raise InvalidField("rank_offset", offset, f"below world_size={world}")
    return {"address": address, "port": port, "offset": offset, "world": world, "name": name, "backend": backend}
