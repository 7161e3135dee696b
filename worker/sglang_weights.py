"""One weights version into SGLang: run the loader inside the engine, collect what each of its ranks reports."""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from ..messages.errors import MessageError
from ..sync.transfer import TransferOrder, TransferReport

logger = logging.getLogger(__name__)
FLUSH_TIMEOUT_S = 10.0


async def transfer_weights(
    manager: Any, order: TransferOrder, *, loader: str, tp_size: int, model: str
) -> TransferReport:
    """Carry out `order` through SGLang's weight-loader hook.

    The loader is called as `loader(model, [(text, tensor)])` on every tensor-parallel rank; `text` is JSON with the
    order, the model's directory and the path to which rank r (the tensor's one element) writes its report, `.rank<r>`
    appended. It tells failures only there: an exception would end the engine. Prefixes cached under older weights are
    dropped afterwards.
    """
    from . import sglang_compat  # noqa: PLC0415  (sglang itself: only where an engine runs)

    with tempfile.TemporaryDirectory(prefix="rolloutmq-") as folder:
        path = Path(folder) / "report"
        text = json.dumps({"order": dataclasses.asdict(order), "report": str(path), "model": model})
        error, refused = "the loader wrote no report", False
        try:
            async with sglang_compat.weight_update(manager):
                await sglang_compat.run_loader(manager, loader, text, tp_size)
        except RuntimeError as refusal:
            error, refused = f"SGLang refused the update: {refusal}", True
        report = _combine([_read(Path(f"{path}.rank{rank}"), error) for rank in range(tp_size)])
    if refused and report.ok:  # loaded, but SGLang could not finish the update: what it would serve is not known
        return TransferReport(ok=False, phase="load", error=error)
    if report.ok and not await sglang_compat.flush_cache(manager, FLUSH_TIMEOUT_S):
        # Harmless for correctness, because every request names its version; the memory comes back as it is needed.
        logger.warning("SGLang did not drop its cached prefixes after weights version %d", order.version)
    return report


def _read(path: Path, otherwise: str) -> TransferReport:
    """A rank's report; without one nothing is known, so the weights count as partly written."""
    try:
        return TransferReport.from_json(path.read_text())
    except (OSError, MessageError) as error:
        return TransferReport(ok=False, phase="load", error=f"{otherwise} ({error})")


def _combine(reports: list[TransferReport]) -> TransferReport:
    """One report for all ranks: the worst failure, or rank 0's with the longest times."""
    failures = [report for report in reports if not report.ok]
    for report in failures:
        if not report.intact:
            return report
    if failures:
        return failures[0]
    return dataclasses.replace(
        reports[0],
        receive_s=max(report.receive_s for report in reports),
        verify_s=max(report.verify_s for report in reports),
        load_s=max(report.load_s for report in reports),
    )
