"""Our own transfer into a tensor-parallel engine: each rank takes its slices of what every rank receives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.engines.carry_out import carry_out
from support.pools.in_place import Judge, greedy, prompts, until, write_versions
from support.s3 import BUCKET, s3_server

from rolloutmq.messages.model.weights import UpdateMode
from rolloutmq.sync.disk.checkpoint import checkpoint_format
from rolloutmq.sync.disk.store import SnapshotStore
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.publish.hub import Hub
from rolloutmq.sync.transfer.order import TransferReport
from rolloutmq.worker.commands.files import upload
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]
RANKS = 2
TIMEOUT_S = 60.0
TOLERANCE = 0.03
"""Of a log-probability, between SGLang in bfloat16 and transformers in float32 on the same bfloat16 weights."""
SLICED = "model.layers.1.self_attn.q_proj.weight"
BUCKET_BYTES = 200_000
PATTERN = "shard-{part}-of-rank_{rank}.safetensors"


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


def check_equal(folder: Path, tensors: dict[str, object]) -> int:
    """A checkpoint has these tensors and no others. Returns the number of its files."""
    from safetensors.torch import load_file  # noqa: PLC0415

    files = list(folder.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == tensors.keys()
    assert [name for name, tensor in tensors.items() if not found[name].equal(tensor)] == []
    return len(files)


async def saved_and_had_again(
    engine: SGLangEngine, line: OwnLine, folder: Path, tensors: dict[str, object], others: dict[str, object]
) -> None:
    """Version 4, which the engine has, is saved whole and in shards, and read again after version 5 was there."""
    whole = await engine.operate("export", {"path": str(folder / "whole"), "version": 4, "max_size": 100_000})
    assert (whole["of_the_trainer"], whole["tensors"]) == (True, len(tensors))
    assert [path.name for path in (folder / "whole").iterdir() if path.name.startswith(".j")] == []
    with s3_server() as store:
        upload(Path(whole["path"]), f"s3://{BUCKET}/whole")
        store.files().get(f"{BUCKET}/whole/v000000000004", str(folder / "back" / "v000000000004"), recursive=True)
    with SnapshotStore(folder / "back").load(4) as back:
        back.verify()
    assert check_equal(folder / "back" / "v000000000004", tensors) > 3

    shards, told = folder / "shards", {"version": 4, "pattern": PATTERN}
    for most in (70_000, 200_000):  # fewer files the second time
        saved = await engine.operate("save_sharded", {"path": str(shards), "max_size": most, **told})
        assert saved["ranks"] == RANKS
    assert sorted(file.name for file in shards.glob("*.safetensors")) == sorted(
        PATTERN.format(rank=rank, part=part) for rank in range(RANKS) for part in range(len(saved["files"]))
    )
    assert checkpoint_format(shards) == "sharded"
    assert (await line.send(5, others)).ok
    before = (await engine.operate("audit", {"version": 5, "names": 5, "only": []}))["fingerprint"]
    assert (await engine.operate("check_sharded", {"path": str(shards)}))["tensors"] == saved["tensors"]
    await engine.operate("load_sharded", {"path": str(shards)})
    after = (await engine.operate("audit", {"version": 4, "names": 5, "only": []}))["fingerprint"]
    assert after != before
    own = await engine.operate("export", {"path": str(folder / "own"), "version": 6})  # under the checkpoint's names
    assert not own["of_the_trainer"]
    check_equal(Path(own["path"]), tensors)


async def read_by_sglang(config: SGLangConfig, shards: Path, judge: Judge) -> None:
    """SGLang's own loader starts an engine from the shards: their folder is its model."""
    sglang = {"load_format": "sharded_state", "model_loader_extra_config": json.dumps({"pattern": PATTERN})}
    engine = SGLangEngine(config.model_copy(update={"model": str(shards), "extra": sglang}))
    await engine.start()
    try:
        (prompt,) = prompts(1)
        assert judge.error(prompt, await engine.generate(greedy(prompt, 30, "0")), [(3, 30)]) < TOLERANCE
    finally:
        await engine.close()


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
        await saved_and_had_again(engine, line, tmp_path, three, one)
        await check(3, "6")
    finally:
        await asyncio.to_thread(line.hub.close)
        await engine.close()
    await read_by_sglang(config, tmp_path / "shards", judge)
