"""One weights version into SGLang: the two halves of a transfer, on all of its ranks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from typing import Any

from ...messages.errors import EngineError
from ...sync.transfer import TransferOrder, TransferReport
from .channel import Channel
from .inside.control import refused

COMMIT_GRACE_S = 30.0
"""For a commit that is not back at its transfer's deadline: copies on the GPU, a trace of the model's loader."""

REFUSED_S = 0.5


async def prepare_weights(channel: Channel, order: TransferOrder, *, tp_size: int) -> TransferReport:
    """The first half on every rank at once, while the engine serves on. Raises EngineError if a rank is silent."""
    question = {"prepare": dataclasses.asdict(order)}
    async with asyncio.timeout(order.timeout_s + COMMIT_GRACE_S):
        return combine(await asyncio.gather(*(channel.ask(rank, question) for rank in range(tp_size))))


async def commit_weights(
    manager: Any,
    channel: Channel,
    order: TransferOrder,
    *,
    loader: str,
    tp_size: int,
) -> TransferReport:
    """The second half: SGLang calls `loader` on every rank between two batches.

    If nothing runs that could be on its way, and there is one rank, the order for that takes the control channel.

    Prefixes cached under older weights stay until their memory is wanted; every request's cache key keeps versions
    apart. Raises EngineError if a rank is silent.
    """
    from . import compat as sglang_compat  # noqa: PLC0415  (sglang itself: only where an engine runs)

    ticket = secrets.token_hex(8)  # not the epoch: those numbers start again in a Redis that lost its data
    told = {"epoch": order.epoch, "mode": order.mode, "version": order.version, "ticket": ticket}
    timeout_s = order.timeout_s + COMMIT_GRACE_S
    try:
        async with asyncio.timeout(timeout_s):
            if tp_size == 1 and order.mode != "in_place" and not manager.rid_to_state:
                question = {"commit": ticket, "loader": loader, "told": json.dumps(told), "timeout_s": timeout_s}
                report = await channel.ask(0, question)
                if report.phase != "ready":  # else a request came first
                    return report
            question = {"committed": ticket, "timeout_s": timeout_s}
            asked = [asyncio.create_task(channel.ask(rank, question)) for rank in range(tp_size)]
            try:
                try:
                    await sglang_compat.run_loader(manager, loader, json.dumps(told), tp_size)
                except RuntimeError as refusal:
                    return await _refused(asked, str(refusal))
                return combine(await asyncio.gather(*asked))
            finally:
                for task in asked:
                    task.cancel()
    except TimeoutError:
        raise EngineError(f"the engine did not load version {order.version} in time") from None


async def send_weights(channel: Channel, order: TransferOrder, *, tp_size: int) -> TransferReport:
    """Send what the engine holds to others, while it serves on. Raises EngineError if it is silent."""
    if tp_size > 1:
        return TransferReport(ok=False, phase="load", error="a tensor-parallel engine holds no tensor whole")
    async with asyncio.timeout(order.timeout_s + COMMIT_GRACE_S):
        return await channel.ask(0, {"send": dataclasses.asdict(order)})


async def _refused(asked: list[asyncio.Task[TransferReport]], why: str) -> TransferReport:
    """What there is to say of an update that SGLang refused, with what the ranks say of it."""
    done, _ = await asyncio.wait(asked, timeout=REFUSED_S)
    failed = [task for task in done if task.exception() is not None]
    report = refused(why, *(task.result() for task in done if task.exception() is None))
    return dataclasses.replace(report, intact=report.intact and not failed)


def combine(reports: list[TransferReport]) -> TransferReport:
    """One report for all ranks: the worst failure, or rank 0's with the longest times."""
    failures = [report for report in reports if not report.ok]
    for report in failures:
        if not report.intact:
            return report
    if failures:
        # A rank that has the new version beside one that kept the old: no whole version at all.
        mixed = any(report.phase == "done" for report in reports)
        return dataclasses.replace(failures[0], intact=not mixed)
    return dataclasses.replace(
        reports[0],
        rendezvous_s=max(report.rendezvous_s for report in reports),
        receive_s=max(report.receive_s for report in reports),
        load_s=max(report.load_s for report in reports),
        readback=all(report.readback for report in reports),
    )
