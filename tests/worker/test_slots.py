"""What counts as too little memory, and how often, after which pauses and beside how many others it is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.pools.pool import eventually
from support.specimens.messages import job

from rolloutmq.messages.errors import EngineDead, EngineError
from rolloutmq.worker import slots as module
from rolloutmq.worker.engine.protocol import EngineRequest
from rolloutmq.worker.generation import Generation
from rolloutmq.worker.jobs.sample import SampleRun
from rolloutmq.worker.slots import RETRIES_S, Slots, is_out_of_memory


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB",
        "Out of memory even after retracting all other requests in the decode batch. Aborting the last request.",
        "Prefill out of memory. Try to lower your batch size.",
        "alloc_req_slots runs out of memory. Please set a smaller number for `--max-running-requests`.",
        "Beam search group aborted: KV cache pool is full. Beam",
        "Retracted under decode memory pressure without a KV backup. Retry later.",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
        "std::bad_alloc",
        "Not enough memory. Please try to increase --mem-fraction-static.",
    ],
)
def test_texts_of_sglang_and_torch(text: str) -> None:
    assert is_out_of_memory(EngineError(f"SGLang failed on the request: {text}"))


@pytest.mark.parametrize(
    "text", ["no such token", "the request timed out", "memory_saver is off", "CUDA error: assert"]
)
def test_other_troubles(text: str) -> None:
    assert not is_out_of_memory(EngineError(text))


def test_halved_and_grown_back(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(16, lambda sample: pytest.fail("nothing waits"))
    slots.grow()
    assert slots.limit == 16
    limits = []
    for _ in range(6):
        slots.relieve()
        limits.append(slots.limit)
    assert limits == [8, 4, 2, 1, 1, 1]
    slots.grow()
    assert slots.limit == 1  # not so soon
    monkeypatch.setattr("rolloutmq.worker.slots.GROW_S", -1.0)  # long ago, whatever the clock says
    limits = []
    for _ in range(9):
        slots.grow()
        limits.append(slots.limit)
    assert limits == [3, 5, 7, 9, 11, 13, 15, 16, 16]


class Full:
    """An engine that never has enough memory."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.tries = 0

    async def generate(self, request: EngineRequest) -> Any:
        self.tries += 1
        await asyncio.sleep(0)
        raise self.error


def runs(count: int) -> list[SampleRun]:
    return [SampleRun(each, each.token_ids, 0, 1, 0.0) for each in (job() for _ in range(count))]


async def test_three_tries_and_then_it_is_another_workers_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RETRIES_S == (0.5, 1.0, 2.0)
    loop, pauses = asyncio.get_running_loop(), list[float]()

    def at_once(delay: float, callback: Callable[..., object], *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        ours = getattr(callback, "__name__", "") == "release"
        if ours:
            pauses.append(delay)
        return later(0.0 if ours else delay, callback, *args, **kwargs)

    later = loop.call_later
    monkeypatch.setattr(loop, "call_later", at_once)
    engine, failed, dead = Full(EngineError("CUDA out of memory")), [], []
    generation = Generation(
        engine,  # type: ignore[arg-type]
        8,
        on_finished=lambda run: None,
        on_refused=lambda run, error: None,
        on_failed=lambda run, error: failed.append(run),
        on_dead=lambda: dead.append(1),
    )
    generation.add(runs(1))
    await eventually(lambda: failed)
    assert (engine.tries, pauses) == (1 + len(RETRIES_S), list(RETRIES_S))
    assert (generation.slots.limit, dead) == (1, [])


async def test_one_incident_halves_once_and_other_errors_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRIES_S", (60.0,))
    failed: list[Any] = []
    for error, slots, gave_up in (
        (EngineError("out of memory"), 8, 0),
        (EngineError("something else"), 16, 16),
        (EngineDead("out of memory"), 16, 0),
    ):
        failed.clear()
        generation = Generation(
            Full(error),  # type: ignore[arg-type]
            16,
            on_finished=lambda run: None,
            on_refused=lambda run, error: None,
            on_failed=lambda run, error: failed.append(run),
            on_dead=lambda: None,
        )
        generation.add(runs(16))
        await eventually(lambda generation=generation: generation.running == 0)
        assert (generation.slots.limit, len(failed)) == (slots, gave_up)
