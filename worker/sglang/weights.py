"""Weights into SGLang: the two halves of a transfer on all of its ranks, and the head of a reward model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import secrets
from pathlib import Path
from typing import Any

from ...messages.errors import EngineError
from ...sync.transfer import TransferOrder, TransferReport
from .channel import Channel
from .wire import HEAD_LOADER, loader_request, refused

COMMIT_GRACE_S = 30.0
"""Seconds that a commit may take beyond its transfer's deadline: copies on the GPU, a trace of the model's loader."""

REFUSED_S = 0.5
"""For the ranks' own reports of an update that SGLang refused."""
HEAD = "score"
"""What SGLang calls the head of a reward model."""
logger = logging.getLogger(__name__)


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

    An engine of one rank without requests is asked to by the control channel, which is faster than SGLang's own. The
    channel is used under SGLang's own lock of updates: no request and no other update begins meanwhile.

    Prefixes cached under older weights stay until their memory is wanted; every request's cache key keeps versions
    apart. Raises EngineError if a rank is silent.
    """
    ticket = secrets.token_hex(8)  # not the epoch: those numbers start again in a Redis that lost its data
    told = {"epoch": order.epoch, "mode": order.mode, "version": order.version, "ticket": ticket}
    timeout_s = order.timeout_s + COMMIT_GRACE_S
    try:
        async with asyncio.timeout(timeout_s):
            if tp_size == 1 and order.mode != "in_place" and not manager.rid_to_state:
                question = {"commit": ticket, "loader": loader, "told": json.dumps(told), "timeout_s": timeout_s}
                async with manager.model_update_lock.writer_lock:  # alike in 0.5.17 and 0.5.23
                    report = await channel.ask(0, question)
                if report.phase != "ready":  # else a request came first
                    return report
            question = {"committed": ticket, "timeout_s": timeout_s}
            asked = [asyncio.create_task(channel.ask(rank, question)) for rank in range(tp_size)]
            try:
                try:
                    await run_loader(manager, loader, json.dumps(told), tp_size)
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
    """The report of an update that SGLang refused, with what the ranks reported of it."""
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


async def run_loader(manager: Any, loader: str, text: str, tp_size: int) -> None:
    """Call `loader(model, [(text, tensor)])` on every tensor-parallel rank; the tensor's one element is the rank.

    Requests may be running: the scheduler does it between two batches. (SGLang's own way, `update_weights_from_tensor`,
    first waits until none is.) Raises RuntimeError if SGLang says that it did not happen.
    """
    request = loader_request(loader, text, tp_size)
    # A request on its way must not arrive after an update that it belongs before. SGLang has no event for its sending.
    while not all(state.dispatched for state in list(manager.rid_to_state.values())):  # noqa: ASYNC110
        await asyncio.sleep(0)
    manager.auto_create_handle_loop()  # else nobody hears the answer on an engine that has had no request yet
    for answer in await manager.update_weights_from_tensor_communicator(request):
        success, message = (answer[0], answer[1]) if isinstance(answer, tuple) else (answer.success, answer.message)
        if not success:
            raise RuntimeError(message)


async def clear_head(manager: Any, model: str, tp_size: int) -> None:
    """Set the bias of a reward model's head to zero if the checkpoint `model` has none.

    SGLang gives the heads of some models (Qwen2ForSequenceClassification and its like) a bias. Without values in the
    checkpoint it keeps those that the layer was made with: every score is off by a number that differs from engine to
    engine.
    """
    if f"{HEAD}.bias" not in checkpoint_names(model):
        await run_loader(manager, HEAD_LOADER, HEAD, tp_size)


def checkpoint_names(model: str) -> frozenset[str]:
    """The names of a checkpoint's tensors; none if they are unknown. model: a folder, or a name that SGLang fetched."""
    from safetensors import safe_open  # noqa: PLC0415 – only for reward models

    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download  # noqa: PLC0415

        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read, its head is taken to have no bias: %s", model, error)
            return frozenset()
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (index := folder / name).exists():
            return frozenset(json.loads(index.read_text())["weight_map"])
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            found.update(tensors.keys())
    if not found and (pickled := folder / "pytorch_model.bin").exists():
        import torch  # noqa: PLC0415 – only for reward models

        found.update(torch.load(pickled, map_location="meta", weights_only=True))
    return frozenset(found)
