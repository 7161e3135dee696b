"""A peer's transfer, on its engine: the engine sends the version that it holds out of its own parameters.

The version is packed as the trainer's manifest lays it out, under the trainer's digests. So receivers verify it against
the trainer, not against the peer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...messages.errors import TransferTimeout, WeightSyncError
from ...messages.model import WeightAnnouncement, WeightManifest
from ..packing import fill
from ..plan import CopyPlan, PlanImpossible
from ..tensors import Place, dtype_named, short_turns, side_stream, values_of
from ..transfer import TransferOrder, TransferReport
from ..wire import Broadcaster, EpochKeys, join_store
from .compatibility import TIED, Dropped
from .receiver import Receiver

log = logging.getLogger(__name__)
LEAVE_LOOK_S = 0.05


class Held:
    """A version in an engine's parameters: a `Sendable` that fills its buckets one after the other in a few buffers."""

    def __init__(
        self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> None:
        """manifest: of the version that was received. tensors: by name, without tied ones that the engine holds under
        another name. buffers: flat uint8, each at least as long as the largest bucket.

        Raises WeightSyncError, which names a tensor of the manifest that is not there, or not under another name.
        """
        kept = [spec for spec in manifest.tensors if spec.name in tensors]
        lost = sorted({spec.name for spec in manifest.tensors} - tensors.keys())
        if set(lost) - TIED:
            raise WeightSyncError(f"the engine does not keep {lost[0]}, so it cannot hand it on ({len(lost)} tensors)")
        Dropped(manifest.tensors, lost).check(values_of([spec.digest for spec in manifest.tensors]))
        self.manifest = WeightManifest.build(
            version=manifest.version, bucket_nbytes=manifest.bucket_nbytes, tensors=tuple(kept)
        )
        self.device, self.rotation = buffers[0].device, len(buffers)
        self._buffers = buffers
        self._inside: list[list[tuple[Place, torch.Tensor]]] = [[] for _ in manifest.bucket_nbytes]
        for spec in kept:
            tensor, dtype = tensors[spec.name], dtype_named(spec.dtype)
            if dtype is None or (tensor.dtype, tuple(tensor.shape)) != (dtype, spec.shape):
                raise WeightSyncError(f"the engine holds {spec.name} as {tensor.dtype} {tuple(tensor.shape)}")
            place = Place(spec.name, dtype, spec.shape, spec.bucket, spec.offset, spec.nbytes)
            self._inside[spec.bucket].append((place, tensor))

    @property
    def buckets(self) -> Iterator[torch.Tensor]:
        """Yield buckets, each filled on the current stream. One is valid until `rotation` more have been asked for."""
        for index, (size, inside) in enumerate(zip(self.manifest.bucket_nbytes, self._inside, strict=True)):
            bucket = self._buffers[index % self.rotation][:size]
            bucket.zero_()
            fill(bucket, inside)
            yield bucket


class PeerLine(Broadcaster):
    """A Broadcaster in an engine. The rendezvous store is in the worker's process, and the worker says when to stop."""

    def __init__(self, order: TransferOrder, deadline: float) -> None:
        """Raises TransferTimeout if the store is not there."""
        store = join_store(order.host, order.port, max(0.1, deadline - time.monotonic()))
        super().__init__(order.host, order.port, store)
        self._keys = EpochKeys(order.epoch)

    def _broken(self) -> str:
        try:
            if self.store.check([self._keys.broken]):
                return str(self.store.get(self._keys.broken).decode(errors="replace"))
        except RuntimeError as error:
            return f"the worker is gone: {error}"
        return ""

    def leave(self, deadline: float) -> None:
        """Leave the group in the background once the transfer is over: buckets may still be on their way."""

        def wait() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone: so is the transfer
                while time.monotonic() < deadline and not self.store.check([self._keys.over]):
                    time.sleep(LEAVE_LOOK_S)
            self.close()

        threading.Thread(target=wait, name="rolloutmq-leave", daemon=True).start()


def held_tensors(plan: CopyPlan | None) -> dict[str, torch.Tensor]:
    """Views of an engine's parameters under the checkpoint's names. Raises PlanImpossible with the reason."""
    if plan is None:
        raise PlanImpossible("how this engine loads its weights cannot be turned round")
    return plan.export()


def send_held(
    receiver: Receiver, order: TransferOrder, tensors: Mapping[str, torch.Tensor] | None = None
) -> TransferReport:
    """Send what `receiver` received last to the order's group, as its rank 0. Blocks; never raises.

    The engine may serve meanwhile, but commits no update. Its weights stay as they are. The report's phase is "done",
    or where it failed. tensors: the version's, by name; by default they are views of the engine's parameters.
    """
    began = time.monotonic()
    deadline = began + order.timeout_s
    try:
        with receiver.lending(order.version) as lent, side_stream(receiver.device), short_turns():
            held = Held(lent.manifest, held_tensors(lent.plan) if tensors is None else tensors, lent.buffers)
            line = PeerLine(order, deadline)
            try:
                _send(line, held, order, deadline)
            finally:
                line.leave(deadline)
    except Exception as error:  # whatever torch raises belongs into the report
        log.warning("version %s could not be sent on: %s", order.version, error)
        phase: Any = "receive" if isinstance(error, TransferTimeout) else "load"
        return TransferReport(ok=False, phase=phase, error=f"{type(error).__name__}: {error}")
    return TransferReport(
        ok=True,
        phase="done",
        tensors=len(held.manifest.tensors),
        nbytes=held.manifest.nbytes,
        receive_s=time.monotonic() - began,
    )


def _send(line: PeerLine, held: Held, order: TransferOrder, deadline: float) -> None:
    line.publish(order.epoch, held.manifest)
    line.send(
        held,
        WeightAnnouncement(
            version=order.version,
            epoch=order.epoch,
            host=order.host,
            port=order.port,
            join_timeout_s=order.timeout_s,
            transfer_timeout_s=order.timeout_s,
            world_size=order.world_size,
            group=order.group,
            backend="nccl" if order.transport == "nccl" else "gloo",
        ),
        deadline - time.monotonic(),
    )
