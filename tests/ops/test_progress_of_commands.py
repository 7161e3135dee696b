"""The bars that commands draw on a terminal, and what they write elsewhere."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from support.bars import last_line, stderr_as_terminal
from support.pools.pool import worker

from rolloutmq import RolloutClient, SamplingParams
from rolloutmq.ops import weights_disk
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.terminal import ProgressLine
from rolloutmq.sync.disk.store import SnapshotStore
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.worker.scripted.engine import ScriptedEngine


def test_snapshots_that_are_verified(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, keep=3)
    for version in (1, 2, 3):
        store.save(PackedWeights(version, [("a", torch.full((40,), float(version)))]).snapshot())
    (file,) = Path(weights_disk.snapshots(tmp_path, verify=False)[1]["path"]).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with stderr_as_terminal() as screen:
        weights_disk.snapshots(tmp_path, verify=True)
    assert "3/3" in last_line(screen)
    assert "version 3, 1 broken" in last_line(screen)


async def test_replay(redis_db: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its stdout has the report and nothing of the bar."""
    async with worker(redis_db, engine=ScriptedEngine(echo=True)):
        async with RolloutClient(redis_db, journal=tmp_path) as client:
            groups = await client.generate([[5, 6 + i] for i in range(6)], SamplingParams(max_new_tokens=8))
            tokens = sum(len(one.results[0].token_ids) for one in groups)
        words = ["replay", "tokens", "--journal", str(tmp_path), "--pool", "default", "--redis", redis_db, "--json"]
        with stderr_as_terminal() as screen:
            await asyncio.to_thread(app, words, standalone_mode=False)
    assert f"{tokens}/{tokens}" in last_line(screen)
    *verdicts, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["summary"]["samples"] == len(verdicts) == 6


def test_elsewhere_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine() as line:
        for done in range(3):
            line.show(done, 3, "version\x1b[2J 7")
    assert capsys.readouterr() == ("", "0 of 3  version\ufffd[2J 7\n")
