"""What SGLang's own update has put into an engine, compared with what the trainer sent.

Nothing of ours sees the bytes arrive there, so all that can be looked at is what the parameters hold afterwards: by the
copies that loading this layout comes down to, which are recorded and never carried out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ...messages.errors import DigestMismatch, WeightSyncError
from ...messages.model import WeightManifest
from ..plan import CopyPlan
from ..tensors import Digester, hex_of
from ..transfer import TransferReport
from .pending import Pending


def stock_report(
    pending: Pending, plan_of: Callable[[], CopyPlan | None], device: torch.device, *, loaded: bool
) -> TransferReport:
    """How it looks before ("ready") or after the update ("done") on this rank. Never raises.

    plan_of: records the model's copies, and refuses names that are not its own. What is wrong before the update leaves
    the engine intact; what is wrong after it does not.
    """
    began, order, compared = time.monotonic(), pending.order, False
    try:
        plan = plan_of()
        if order.verify and plan is None:
            raise WeightSyncError(
                "the model's loader does more than copy, so nothing could be checked after SGLang's own update: "
                "publish with transfer='own', or with verify=False"
            )
        if loaded and device.type == "cuda":
            torch.cuda.synchronize(device)
        if loaded and order.verify and plan is not None:
            compared = check_held(plan, pending.told.manifest(), finite=order.nonfinite == "refuse")
    except Exception as error:  # whatever torch or the model raises belongs into the report
        why = f"{type(error).__name__}: {error}"
        return TransferReport(ok=False, phase="verify" if loaded else "load", error=why, intact=not loaded)
    return pending.report("done" if loaded else "ready", load_s=time.monotonic() - began, readback=compared)


def check_held(plan: CopyPlan, manifest: WeightManifest, *, finite: bool) -> bool:
    """Compare what the engine's parameters hold with the manifest; they must not change meanwhile.

    Returns whether every tensor was compared: one that is here in part (a slice of tensor parallelism) or in another
    dtype has no digest to be compared with, and is only looked through for NaN and Inf. Raises DigestMismatch with the
    name of the first tensor that is wrong.
    """
    digests = {spec.name: spec.digest for spec in manifest.tensors}
    copies = [copy for several in plan.copies.values() for copy in several]
    whole = [copy for copy in copies if copy.whole]
    found, bad = _look([copy.destination for copy in whole])
    for copy, held in zip(whole, hex_of(found), strict=True):
        if held != digests[copy.name]:
            raise DigestMismatch(
                f"tensor {copy.name}: the engine holds {held} after the load, the trainer sent {digests[copy.name]}"
            )
    nonfinite = [copy.name for copy, count in zip(whole, bad.tolist(), strict=True) if count]
    for copy in copies:
        if not copy.whole and int(_look([copy.destination.contiguous()])[1]):  # one at a time: it may be a copy
            nonfinite.append(copy.name)
    if finite and nonfinite:
        raise DigestMismatch(f"tensor {nonfinite[0]}: has NaN or Inf in it")
    return len(whole) == len(copies)


def _look(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Digests, (n,) int64, and counts of NaN and Inf, (n,) int32."""
    device = tensors[0].device if tensors else torch.device("cpu")
    found = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    bad = torch.zeros(len(tensors), dtype=torch.int32, device=device)
    Digester(tensors).run(found, bad)
    return found, bad
