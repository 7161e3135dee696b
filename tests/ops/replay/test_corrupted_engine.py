"""One worker of two computes wrongly from a version on, and no check of weights can see it: replays find it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines.forking import Forked, command_line
from support.engines.remote import RemoteEngine
from support.pools.corrupted import Run, record

from rolloutmq.worker.sglang.engine import SGLangConfig

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]
VERSIONS, BROKEN = 20, 13
ENGINE = ("--engine", "max_total_tokens=8192", "--engine", "mem_fraction=0.3")


@pytest.fixture(scope="module")
def bad_engine(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    config = SGLangConfig(model=str(text_model), dtype="float32", max_running=8, max_total_tokens=8192)
    engine = RemoteEngine(config, tmp_path_factory.mktemp("engine") / "log")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def run(
    text_model: Path, text_engine: RemoteEngine, bad_engine: RemoteEngine, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    folder = tmp_path_factory.mktemp("run")
    return record(folder, text_model, text_engine, bad_engine, versions=VERSIONS, broken=BROKEN)


def replay(run: Run, folder: Path, mode: str, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and lines of `rolloutmq replay --json`, in a process of its own: its engine is the only one there."""
    log = folder / "replay.log"
    where = ("--journal", str(run.journal), "--snapshots", str(run.snapshots))
    code = Forked(command_line, "replay", mode, *where, *options, "--json", log=log).wait(300)
    said = [line for line in log.read_text().splitlines() if line.startswith("{")]
    assert said, log.read_text()
    return code, [json.loads(line) for line in said]


def test_regenerating_finds_the_samples(run: Run, tmp_path: Path) -> None:
    code, (*verdicts, told) = replay(run, tmp_path, "tokens", *ENGINE)
    wrong = [one for one in verdicts if one["state"] != "same"]
    assert code == 1
    assert told["summary"]["samples"] == 2 * VERSIONS
    assert {one["worker"] for one in wrong} == {run.worker}
    assert [one["version"] for one in wrong] == list(range(BROKEN, VERSIONS + 1))


def test_scoring_names_the_worker_and_the_first_wrong_version(run: Run, tmp_path: Path) -> None:
    code, (*verdicts, gaps, told) = replay(run, tmp_path, "score")
    assert code == 1
    assert told["summary"]["differs"] == VERSIONS - BROKEN + 1
    assert {one["worker"] for one in verdicts if one["state"] == "differs"} == {run.worker}
    (finding,) = gaps["gaps"]["findings"]
    assert finding.startswith(f"worker {run.worker} from version {BROKEN} on: largest gap")
    assert gaps["gaps"]["by_worker"][run.worker]["largest"] > 1e-3
    others = [one for worker, one in gaps["gaps"]["by_worker"].items() if worker != run.worker]
    assert [one["largest"] < 2e-5 for one in others] == [True]


@pytest.mark.parametrize("how", [ENGINE, ("--by", "score")], ids=["tokens", "score"])
def test_bisect_finds_the_version_with_five_replays(run: Run, tmp_path: Path, how: tuple[str, ...]) -> None:
    code, (found,) = replay(run, tmp_path, "bisect", *how)
    assert code == 0
    assert (found["good"], found["broken"], found["again"]) == (BROKEN - 1, BROKEN, [])
    assert len(found["tested"]) <= 5


def test_positions_that_are_encoded_otherwise_are_named(
    text_model: Path, text_engine: RemoteEngine, bad_engine: RemoteEngine, tmp_path: Path
) -> None:
    """As by another rope scaling: right up to a position, wrong from there on."""
    wrong = record(tmp_path, text_model, text_engine, bad_engine, versions=1, broken=1, first=64, prompt=40, tokens=40)
    code, (*_, gaps, _) = replay(wrong, tmp_path, "score")
    assert code == 1
    assert {name: one["wrong"] for name, one in gaps["gaps"]["by_position"].items()}["32 to 63"] is False
    assert "only from position 64 on" in gaps["gaps"]["findings"][-1]
