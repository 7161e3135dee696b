"""Brings weights into SGLang: the two halves of a transfer on all of its ranks, and the head of a reward model."""

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
"""Seconds that a commit may take beyond its transfer's deadline: it copies, and may trace the model's loader."""

REFUSED_S = 0.5
"""Seconds to wait for the ranks' own reports of an update that SGLang refused."""
HEAD = "score"
"""What SGLang calls the head of a reward model."""
logger = logging.getLogger(__name__)


async def prepare_weights(channel: Channel, order: TransferOrder, *, tp_size: int) -> TransferReport:
    """Run the first half on all ranks at once, while the engine serves.

    Raises EngineError if a rank does not answer.
    """
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
    """Run the second half: SGLang calls `loader` on every rank between two batches.

    If the engine has one rank and no requests, the control channel sets it off, which is faster than SGLang's own way.
    It holds SGLang's own lock of updates, so no request and no other update begins meanwhile.

    Prefixes cached under older weights stay until their memory is needed. Cache keys of requests keep versions apart.
    Raises EngineError if a rank does not answer.
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
                if report.phase != "ready":  # "ready": a request came first, so SGLang's own way follows
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


async def _refused(asked: list[asyncio.Task[TransferReport]], why: str) -> TransferReport:
    """Return the report of an update that SGLang refused, with the ranks' own reports if there are any."""
    done, _ = await asyncio.wait(asked, timeout=REFUSED_S)
    failed = [task for task in done if task.exception() is not None]
    report = refused(why, *(task.result() for task in done if task.exception() is None))
    return dataclasses.replace(report, intact=report.intact and not failed)


def combine(reports: list[TransferReport]) -> TransferReport:
    """Return one report for all ranks: the worst failure, or rank 0's report with the longest times."""
    failures = [report for report in reports if not report.ok]
    for report in failures:
        if not report.intact:
            return report
    if failures:
        # One rank has the new version and another one kept the old, so the engine holds no whole version.
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
    """Call `loader(model, [(text, tensor)])` on every tensor-parallel rank. The tensor's one element is the rank.

    Requests may be running, because the scheduler does it between two batches. (SGLang's `update_weights_from_tensor`
    first waits until none runs.) Raises RuntimeError if SGLang says that it did not happen.
    """
    request = loader_request(loader, text, tp_size)
    # A request that was made before the update must not arrive after it. SGLang has no event for when it is sent.
    while not all(state.dispatched for state in list(manager.rid_to_state.values())):  # noqa: ASYNC110
        await asyncio.sleep(0)
    manager.auto_create_handle_loop()  # without it nobody receives the answer of an engine that has had no request yet
    for answer in await manager.update_weights_from_tensor_communicator(request):
        success, message = (answer[0], answer[1]) if isinstance(answer, tuple) else (answer.success, answer.message)
        if not success:
            raise RuntimeError(message)


async def clear_head(manager: Any, model: str, tp_size: int) -> None:
    """Set the bias of a reward model's head to zero if the checkpoint `model` has none.

    SGLang gives the heads of some models (Qwen2ForSequenceClassification and similar ones) a bias. If the checkpoint
    has no values for it, the layer keeps its initial ones. Then every score is off by a number that differs between
    engines.
    """
    if f"{HEAD}.bias" not in checkpoint_names(model):
        await run_loader(manager, HEAD_LOADER, HEAD, tp_size)


def checkpoint_names(model: str) -> frozenset[str]:
    """Return the names of a checkpoint's tensors, none if unknown.

    model: a folder, or a hub name that SGLang fetched.
    """
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
