"""Our own transfer into a tensor-parallel engine: each rank takes its slices of what every rank receives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.engines.carry_out import carry_out
from support.pools.in_place import Judge, greedy, prompts, until, write_versions

from rolloutmq.messages.model.weights import UpdateMode
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.publish.hub import Hub
from rolloutmq.sync.transfer.order import TransferReport
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]
RANKS = 2
TIMEOUT_S = 60.0
TOLERANCE = 0.03
"""Of a log-probability, between SGLang in bfloat16 and transformers in float32 on the same bfloat16 weights."""
SLICED = "model.layers.1.self_attn.q_proj.weight"
BUCKET_BYTES = 200_000


class OwnLine:
    """Sends versions to `engine`: a trainer without a pool."""

    def __init__(self, engine: SGLangEngine) -> None:
        self.engine = engine
        self.hub = Hub("127.0.0.1", 0, lambda: None, gpu_direct=False, timeout_s=TIMEOUT_S)
        self._epoch = 0

    async def send(self, version: int, tensors: dict[str, object], mode: UpdateMode = "resume") -> TransferReport:
        """Both halves of one transfer."""
        self._epoch += 1
        snapshot = PackedWeights(version, tensors.items(), BUCKET_BYTES).snapshot()
        assert len(snapshot.buckets) > 1
        return await carry_out(self.engine, self.hub, snapshot, self._epoch, TIMEOUT_S, mode=mode)


async def test_versions_by_every_mode_and_one_that_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    versions = write_versions(tmp_path, 4, dtype="bfloat16")
    judge, (prompt,) = Judge(versions), prompts(1)
    one, two, three = (load_file(path) for path in versions[1:])
    config = SGLangConfig(model=str(versions[0]), dtype="bfloat16", tp_size=RANKS, max_running=4, max_total_tokens=2048)
    engine = SGLangEngine(config)
    await engine.start()
    line = OwnLine(engine)

    async def check(version: int, key: str) -> None:
        output = await engine.generate(greedy(prompt, 30, key))
        assert judge.error(prompt, output, [(version, 30)]) < TOLERANCE
        assert judge.error(prompt, output, [((version + 1) % 4, 30)]) > 10 * TOLERANCE

    try:
        report = await line.send(1, one)
        assert (report.ok, report.phase, report.readback) == (True, "done", True), report
        assert (report.tensors, report.switched) == (len(one), {})
        await check(1, "1")

        request = greedy(prompt, 200, "1")
        running = asyncio.create_task(engine.generate(request))
        await until(lambda: (p := engine.progress(request.request_id)) is not None and len(p.token_ids) > 10)
        report = await line.send(2, two, "in_place")
        assert (report.ok, report.phase, report.readback) == (True, "done", True), report
        count = report.switched[request.request_id]
        assert 10 < count < 200
        output = await running
        assert judge.error(prompt, output, [(1, count), (2, 200 - count)]) < TOLERANCE
        assert judge.error(prompt, output, [(1, 200)]) > 10 * TOLERANCE
        await check(2, "2")

        bad = three | {SLICED: three[SLICED].clone()}
        bad[SLICED][-1, -1] = float("nan")  # in the second rank's slice
        report = await line.send(3, bad)
        assert (report.ok, report.phase, report.intact) == (False, "receive", True), report
        assert f"tensor {SLICED}: has NaN or Inf in it" in report.error
        await check(2, "2")

        report = await line.send(4, three)
        assert (report.ok, report.phase, report.readback) == (True, "done", True), report
        await check(3, "4")
    finally:
        await asyncio.to_thread(line.hub.close)
        await engine.close()
