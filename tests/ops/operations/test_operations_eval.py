"""Evaluation of versions as an operation: scores, intervals, paired differences, and going on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.pools.operations import Gated
from support.pools.pool import eventually, worker

from rolloutmq.messages import Broker, ConfigError, InvalidField, connect
from rolloutmq.ops.operations import run_operation
from rolloutmq.ops.operations.catalog.eval_sweep import interval
from rolloutmq.producer.control import PoolControl

PROMPTS = 20
SCORER = """
def by_version(line, result):
    if line["reference"] == 7 and result.versions == (9,):
        raise ValueError("seven, half a character: \\ud800")
    if line["reference"] == 8 and result.versions == (9,):
        raise SystemExit(8)
    return line["reference"] + result.versions[0] / 2 + result.sample
"""


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "my_scores.py").write_text(SCORER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ROLLOUTMQ_SCORERS", "other=nowhere:f,mine=my_scores:by_version")
    prompts = [{"token_ids": [5 + i], "reference": i, "sampling": {"max_new_tokens": 3}} for i in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    return {"prompts": str(tmp_path / "prompts.jsonl"), "out": str(tmp_path / "out.jsonl"), "scorer": "mine", "n": 2}


async def run(url: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
    return await run_operation("eval-sweep", params, redis_url=url, pool="default", report=lambda _: None, **more)


def written(out: str) -> list[dict[str, Any]]:
    path = Path(out)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [json.loads(line) for line in lines[1:-1]]


async def test_versions_are_compared_on_the_same_prompts(redis_db: str, params: dict[str, Any]) -> None:
    async with worker(redis_db), PoolControl(redis_db) as control:
        first = await run(redis_db, params)
        assert (first["version"], first["differences"]) == (0, [])
        (alone,) = first["versions"]
        assert (alone["prompts"], alone["samples"], alone["mean"]) == (PROMPTS, 2 * PROMPTS, 10.0)
        assert alone["low"] < 10.0 < alone["high"]
        assert await run(redis_db, params) == first  # nothing is generated again
        (await control.set_version(4)).check()
        async with connect(redis_db) as db:
            await eventually(lambda: _serves(db, 4))
        second = await run(redis_db, params)
    assert [one["version"] for one in second["versions"]] == [0, 4]
    assert second["versions"][0] == alone
    assert second["differences"] == [
        {"version": 4, "before": 0, "prompts": PROMPTS, "mean": 2.0, "low": 2.0, "high": 2.0}
    ]
    assert (second["failed"], second["unscored"], second["mixed"], second["missing"]) == (0, 0, 0, 0)
    assert len(written(params["out"])) == 2 * 2 * PROMPTS


async def _serves(db: Any, version: int) -> bool:
    return [one.version for one in await Broker(db, "default").workers()] == [version]


async def test_it_goes_on_where_it_was_cut_off(redis_db: str, params: dict[str, Any]) -> None:
    engine, notes = Gated(PROMPTS), {"version": 0}
    async with worker(redis_db, engine=engine, max_running=8), connect(redis_db) as db:
        cut = asyncio.create_task(run(redis_db, params, notes=notes))
        await eventually(lambda: len(written(params["out"])) > 5 and engine.free < 0)
        cut.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cut
        assert 5 < len(written(params["out"])) <= PROMPTS
        engine.gate.set()
        result = await run(redis_db, params, notes=notes)
        assert int(await db.hget("rmq:{default}:load", "accepted")) == PROMPTS
    assert (result["missing"], result["versions"][0]["samples"]) == (0, 2 * PROMPTS)
    places = [(line["line"], line["sample"]) for line in written(params["out"])]
    assert sorted(places) == [(line, sample) for line in range(1, PROMPTS + 1) for sample in range(2)]


async def test_a_sample_without_a_score_is_counted(redis_db: str, params: dict[str, Any]) -> None:
    async with worker(redis_db), PoolControl(redis_db) as control, connect(redis_db) as db:
        (await control.set_version(9)).check()
        await eventually(lambda: _serves(db, 9))
        result = await run(redis_db, params)
    assert (result["unscored"], result["versions"][0]["prompts"]) == (4, PROMPTS - 2)
    errors = {line.get("error") for line in written(params["out"])}
    assert errors == {None, "ValueError: seven, half a character: ?", "RuntimeError: SystemExit: 8"}


async def test_scorers_are_those_of_the_worker(redis_db: str, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=r"scorer='os:system'|scorer='os.system'"):
        await run(redis_db, params | {"scorer": "os.system"})
    with pytest.raises(ConfigError, match="nowhere:f"):
        await run(redis_db, params | {"scorer": "other"})
    with pytest.raises(ConfigError, match="no file of evaluation"):
        await run(redis_db, params | {"out": params["prompts"]})


def test_intervals() -> None:
    def of(values: list[float]) -> dict[str, float | None]:
        return interval(values, draws=2000, confidence=0.95, seed=0)

    values = [0.0, 1.0] * 50
    found = of(values)
    assert found == of(values)
    assert found["mean"] == 0.5
    # The standard error is 0.05.
    assert found["low"] == pytest.approx(0.5 - 1.96 * 0.05, abs=0.02)
    assert found["high"] == pytest.approx(0.5 + 1.96 * 0.05, abs=0.02)
    assert of([]) == {"mean": None, "low": None, "high": None}
    assert of([3.0]) == {"mean": 3.0, "low": None, "high": None}
