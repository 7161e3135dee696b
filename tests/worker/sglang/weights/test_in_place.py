"""Weights replaced while requests run, in real SGLang: every token is of the version it is said to be of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.engines.fixtures import MAX_RUNNING as RUNNING
from support.pools.in_place import InPlaceEngine, Judge, check_crossing, greedy, prompts, until, write_versions

from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
TOLERANCE = 2e-3
"""Of a log-probability; both sides compute in float32, in batches of different shapes."""


@pytest.fixture(scope="module")
def versions(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The engine has version 0; the tests below go on to 1, 2 and 3 in order, and back."""
    return write_versions(tmp_path_factory.mktemp("in-place"), 4, model=tiny_model)


@pytest.fixture(scope="module")
def judge(versions: list[Path]) -> Judge:
    return Judge(versions)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def switching(engine: InPlaceEngine, versions: list[Path]) -> AsyncIterator[InPlaceEngine]:
    """The shared engine; it has its own weights again afterwards."""
    yield engine
    answer = await engine.replace(versions[0] / "model.safetensors", "4")
    assert "error" not in answer, answer


def start(engine: InPlaceEngine, requests: list[EngineRequest]) -> list[asyncio.Task[EngineOutput]]:
    return [asyncio.create_task(engine.generate(request)) for request in requests]


async def past(engine: InPlaceEngine, request: EngineRequest, count: int) -> None:
    """Until a running request has told of `count` tokens."""
    await until(lambda: (p := engine.progress(request.request_id)) is not None and len(p.token_ids) >= count)


async def test_running_requests_go_on_and_new_ones_find_nothing_old(
    switching: InPlaceEngine, versions: list[Path], judge: Judge
) -> None:
    engine = switching
    overlap = bool(engine.config.overlap_schedule)
    asked = prompts(RUNNING + 4)
    for prompt in asked[RUNNING:]:  # cached under version 0
        await engine.generate(greedy(prompt, 2, "0"))
    again = await engine.generate(greedy(asked[-1], 2, "0"))
    assert again.cached_tokens >= len(asked[-1]) - 1
    running = [greedy(prompt, 400, "0") for prompt in asked[:RUNNING]]
    waiting = [greedy(prompt, 24, "0") for prompt in asked[RUNNING:]]
    tasks = start(engine, running)
    await past(engine, running[-1], 50)
    tasks += start(engine, waiting)
    await asyncio.sleep(0)  # what `Generation.switching` does: the requests are on their way before the update is
    answer = await engine.replace(versions[1], "1")
    late = start(engine, [greedy(prompt, 24, "0") for prompt in asked[RUNNING:]])  # under the old key, as if overtaken
    outputs = await asyncio.gather(*tasks, *late)

    assert answer["pending"] == int(overlap)
    assert answer["waiting"] == [request.request_id for request in waiting]
    assert set(answer["counts"]) == {request.request_id for request in running + waiting}
    certain = 0
    for request, prompt, output in zip(running, asked, outputs, strict=False):
        count = answer["counts"][request.request_id]
        assert 50 <= count < 400
        assert len(output.token_ids) == 400
        certain += check_crossing(judge, prompt, output, [(0, count), (1, 400 - count)], TOLERANCE)
    assert certain >= RUNNING // 2  # the counts are exact, not only about right
    fresh = zip(asked[RUNNING:] * 2, outputs[RUNNING:], strict=True)
    for prompt, output in fresh:
        assert judge.error(prompt, output, [(1, 24)]) < TOLERANCE
        assert output.cached_tokens == 0
    assert {answer["counts"][request.request_id] for request in waiting} == {0}
    again = await engine.generate(greedy(asked[-1], 24, "1"))
    assert again.cached_tokens >= len(asked[-1]) - 1  # of the new weights there is something to find
    assert judge.error(asked[-1], again, [(1, 24)]) < TOLERANCE
    # What ran across the switch is cached, but for nobody: its KV is of two versions.
    for prompt in asked[:RUNNING]:
        output = await engine.generate(greedy(prompt, 8, "1"))
        assert output.cached_tokens == 0
        assert judge.error(prompt, output, [(1, 8)]) < TOLERANCE


@pytest.mark.slow
async def test_two_switches_within_one_request(switching: InPlaceEngine, versions: list[Path], judge: Judge) -> None:
    engine = switching
    asked = prompts(RUNNING, seed=1)
    # Different lengths: some end before, between and after the switches.
    lengths = [40, 60, 120, 500, 500, 500, 500, 500]
    requests = [greedy(prompt, length, "1") for prompt, length in zip(asked, lengths, strict=True)]
    tasks = start(engine, requests)
    await past(engine, requests[-1], 50)
    first = await engine.replace(versions[2], "2")
    count = first["counts"][requests[-1].request_id]
    await past(engine, requests[-1], count + 1 + 50)
    second = await engine.replace(versions[3], "3")
    crossed = set()
    for prompt, request, length, task in zip(asked, requests, lengths, tasks, strict=True):
        output = await task
        a = min(length, first["counts"].get(request.request_id, length))
        b = min(length, second["counts"].get(request.request_id, length))
        segments = [(version, n) for version, n in ((1, a), (2, b - a), (3, length - b)) if n]
        assert judge.error(prompt, output, segments) < TOLERANCE
        crossed.add(len(segments))
    assert {1, 3} <= crossed


async def test_a_version_that_has_been_used_cannot_come_again(switching: InPlaceEngine, versions: list[Path]) -> None:
    engine = switching
    await engine.generate(greedy(prompts(1)[0], 2, "3"))
    for key in ("0", "3"):
        answer = await engine.replace(versions[1], key)
        assert "requests have run as version" in answer["error"]
    manager = engine._current().manager
    from sglang.srt.managers import io_struct  # noqa: PLC0415

    await manager.pause_generation(io_struct.PauseGenerationReqInput(mode="in_place"))
    answer = await engine.replace(versions[1], "4")
    assert "paused" in answer["error"]
    await manager.continue_generation(io_struct.ContinueGenerationReqInput(torch_empty_cache=False))
    assert len((await engine.generate(greedy(prompts(1)[0], 2, "3"))).token_ids) == 2
