"""One engine rank's side of a transfer: `prepare` while the old weights serve, `commit` between two batches.

ways.py has the ways in which a version arrives.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch

from ...messages.errors import DigestMismatch, TransferTimeout, WeightSyncError
from ...messages.model import StagingPolicy, WeightManifest
from ..disk.checkpoint import checkpoint_tensors
from ..plan import CopyPlan
from ..tensors import short_turns
from ..transfer import TransferOrder, TransferReport
from ..wire import Brief, Offer, begin
from .arriving import Arriving
from .lend import held_offer
from .loading import Model
from .state import RankState, import_early, warm_up
from .ways import Way, way_of


class Receiver:
    """One rank's part in transfers. Any thread may call `prepare`; call `commit` only where nothing uses the model.

    device: of the engine's weights. rank, ranks: among the engine's tensor-parallel ranks, and how many there are. An
    engine of several ranks serves with collectives, and only a staged version is received beside those. model_dir: the
    engine's checkpoint. A version must have its names. staging: see `Staging`. recorded: whether loads are recorded as
    copies, for which torch needs seconds of imports. They begin now, and beside the first version.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        rank: int = 0,
        model_dir: str = "",
        staging: StagingPolicy = "auto",
        ranks: int = 1,
        recorded: bool = True,
    ) -> None:
        self.device, self.rank = device, rank
        known = checkpoint_tensors(model_dir) if model_dir else {}
        self.state = RankState(device, rank, ranks, known, staging)
        self._imports = begin(import_early) if recorded else None
        self._pending: Way | None = None  # prepared
        self._under_way: Way | None = None  # to be ended before the next one, if nobody commits it
        self._lock = threading.Lock()
        self._over: tuple[TransferOrder, str, Arriving | None] | None = None  # committed, until it is cleared away
        self._held: tuple[Brief, CopyPlan | None] | None = None
        self._lent = False

    # --- first half ------------------------------------------------------------------------------------------------

    def prepare(self, order: TransferOrder) -> TransferReport:
        """Join the transfer; receive and verify it if there is memory for that. Never raises.

        The report's phase is "staged" or "ready" if it went well. What an earlier `prepare` left behind is dropped.
        """
        state, began, self._pending = self.state, time.monotonic(), None
        state.lines.newest = order
        with self._lock, state.on_device(), short_turns():
            self._end_under_way()
            state.lines.withdraw("its holder takes a newer version")
            try:
                warm_up(self.device)
                self._under_way = way = way_of(state, order, began + order.timeout_s)
                if way.transport != "pull":
                    state.overwritten()
                way.start()
                way.rendezvous_s = time.monotonic() - began
                way.receive()
                if way.staged:
                    way.receive_s = time.monotonic() - began - way.rendezvous_s
                    if order.verify:
                        way.phase = "verify"
                        way.verify()
                if way.local:
                    self._is_here(order, way.who)
                if self._imports is not None:
                    self._imports.result()
            except Exception as error:  # whatever torch raises belongs into the report
                failed = self._under_way
                state.lines.withdraw(f"its holder could not take it: {error}")  # who waits for it here asks elsewhere
                self._end_under_way()
                self._forget_group_after(error)
                if failed is not None:
                    failed.let_go()
                phase = "rendezvous" if failed is None else failed.phase
                return TransferReport(ok=False, phase=phase, error=f"{type(error).__name__}: {error}")
            self._pending = way
            if way.staged and way.transport == "nccl" and order.verify:
                offer = Offer(order.token, way.told.manifest, len(way.buckets), way.buckets.__getitem__)
                self._offer(offer, order)
        return way.report("staged" if way.staged else "ready", receive_s=way.receive_s)

    # --- second half -----------------------------------------------------------------------------------------------

    def commit(self, epoch: int, model: Model, *, idle: bool = False) -> TransferReport:
        """Bring what `prepare` prepared into the model. Never raises.

        Call it where no forward pass can start. It first waits for one that still runs on the GPU.
        idle: certainly none runs. Then the first bucket is loaded while the second one arrives.
        """
        if self._lent:
            return TransferReport(ok=False, phase="load", error="the engine's weights are being looked at")
        with self._lock:
            way, self._pending = self._pending, None
            if way is None or way.order.epoch != epoch:
                self._end_under_way()
                return TransferReport(ok=False, phase="load", error=f"transfer {epoch} is not prepared here")
            self._under_way = None  # this commit ends it, whatever is prepared next
        began, state, intact, verify = time.monotonic(), self.state, True, way.order.verify
        way.phase = "load"
        try:
            way.begin(at_once=idle and not way.staged and state.knows(way.told, way.buckets, model))
            if time.monotonic() >= way.deadline:  # the sender has closed it, and may have let go of its buffers
                raise TransferTimeout("the time for this transfer is over")
            loading = state.loading(way.told, way.buckets, model)
            loading.check_dropped(way.told.digests)
            way.check(loading)
            intact, self._held = False, None
            way.load(loading)
        except Exception as error:  # whatever torch or the model raises belongs into the report
            way.end()
            self._forget_group_after(error)
            state.drop_loading()
            return TransferReport(ok=False, phase=way.phase, error=f"{type(error).__name__}: {error}", intact=intact)
        finally:
            way.let_go()
        seconds = time.monotonic() - began
        if verify:
            self._held = way.told, state.last_plan
            self._offer_held(way)
        self._over = way.order, "" if way.local else way.who, way.arriving
        return way.report(
            "done",
            receive_s=way.receive_s if way.staged else seconds,
            load_s=seconds,
            readback=loading.readback and verify,
        )

    def clear_away(self) -> None:
        """Tell the sender of the last `commit` that nothing more is needed of it, and free what that has used. It takes
        a millisecond of which nothing should wait: not the answer, not requests that stand still."""
        over, self._over = self._over, None
        if over is not None:
            order, who, arriving = over
            self._is_here(order, who)
            if arriving is not None:
                arriving.forget()

    # --- what others may have of it ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lending(self, version: int) -> Iterator[tuple[WeightManifest, CopyPlan | None]]:
        """Give the manifest of the version that the engine holds, and the copy plan by which it was loaded.

        Nothing is prepared or committed inside this block. Raises WeightSyncError if the engine takes part in a
        transfer, or does not hold `version`, received and verified.
        """
        if not self._lock.acquire(blocking=False):
            raise WeightSyncError("the engine takes part in a transfer itself")
        try:
            self._lent = True
            if self._held is None or self._held[0].version != version:
                raise WeightSyncError(f"the engine does not hold version {version}, received and verified")
            with self.state.on_device():
                yield self._held[0].manifest(), self._held[1]
        finally:
            self._lent = False
            self._lock.release()

    def _is_here(self, order: TransferOrder, who: str) -> None:
        """Tell the sender that nothing more is needed of it. One that is gone needs no word."""
        if who:
            with contextlib.suppress(TransferTimeout):
                self.state.lines.done(order, who)

    def _offer(self, offer: Offer, order: TransferOrder) -> None:
        offer.arrived()
        self.state.lines.put(offer, order)

    def _offer_held(self, way: Way) -> None:
        """Offer a version that is in the parameters alone, if it can be read back out of them."""
        plan = self.state.last_plan
        if self.state.lines.offer is None and way.order.token and plan is not None:
            self._offer(held_offer(way.order.token, way.told, plan), way.order)

    def stage(self, policy: StagingPolicy) -> None:
        """Set whether versions are received beside the weights that serve.

        No effect on a CPU, which always does that.
        """
        self.clear_away()
        self.state.stage(policy)

    def forget(self, *, held: bool) -> None:
        """Free all buffers. held: forget which version the parameters hold too, because something else writes them."""
        self._end_under_way()
        self.clear_away()
        self.state.lines.withdraw("its holder gives the memory up")
        self.state.overwritten()
        self._pending = None
        self.state.drop_buffers()
        self._held = None if held else self._held
        for memory in self.state.memory.values():
            memory.release()

    # --- after a failure -------------------------------------------------------------------------------------------

    def _end_under_way(self) -> None:
        way, self._under_way = self._under_way, None
        if way is not None:
            way.end()

    def _forget_group_after(self, error: Exception) -> None:
        if not isinstance(error, DigestMismatch):
            self.state.lines.forget()
