"""Weights that are half written never serve: what a worker does until it has a whole version again."""

from __future__ import annotations

import pytest
from support.peers.publishing import publish, publisher, serve_some
from support.pools.pool import Running, check_scripted, eventually, runs, wait_replies, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, SamplingParams
from rolloutmq.messages.model.weights import UpdateMode
from rolloutmq.sync.transfer.ledger import Ledger
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.scripted.engine import ScriptedEngine

JOBS = 12


class Torn(ScriptedEngine):
    """Its load of version `breaks` ends half way."""

    breaks = 1

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        report = await super().commit_weights(order)
        return TransferReport(False, "load", "CUDA error", intact=False) if order.version == self.breaks else report


async def no_progress(running: Running, ledger: Ledger) -> None:
    """Quarantined: it takes no job, and what it holds does not run."""
    assert running.generation.state.quarantined
    assert running.worker._status().state == "syncing"
    assert running.worker._room() == 0
    assert running.generation.gate.reasons == ["quarantine"]
    assert running.generation.running == 0


@pytest.mark.parametrize("mode", ["resume", "drain"])
async def test_weights_that_are_half_written_never_serve(redis_db: str, ledger: Ledger, mode: UpdateMode) -> None:
    """Until a whole version is there: the engine stays up, what it held waits, and goes on under the new version."""
    engine = Torn(tokens_per_s=200)
    # prefetch: something waits in the worker when "drain" has run what was in the engine to its end
    async with (
        worker(redis_db, engine=engine, max_running=1, prefetch=0) as running,
        publisher(redis_db, mode=mode) as source,
    ):
        broker = Broker(ledger.redis, "default")
        await broker.enqueue([job(sampling=SamplingParams(max_new_tokens=80)) for _ in range(JOBS)])
        await eventually(lambda: runs(engine))
        report = await publish(source, 1)
        assert (report.state, report.failures) == ("failed", {running.id: "load: CUDA error"})
        await no_progress(running, ledger)
        engine.tokens_per_s = 1e9
        tokens = running.generation.generated_tokens
        assert (await publish(source, 2)).state == "committed"
        assert engine.starts == 1
        found = [reply.outcome for reply in await wait_replies(broker, JOBS)]
        assert tokens < JOBS * 80
        for one in found:
            assert set(one.versions) <= {0, 2}
            assert one.attempt == 1
            check_scripted(one, 3)
        assert any(2 in one.versions for one in found)  # type: ignore[union-attr]


async def test_a_quarantine_that_nobody_mends_ends_with_a_restart(
    redis_db: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(redis_db, engine=Torn()) as running, publisher(redis_db) as source:
        monkeypatch.setattr("rolloutmq.worker.engine_state.QUARANTINE_S", 0.5)
        report = await publish(source, 1)
        assert report.failures == {running.id: "load: CUDA error"}
        await no_progress(running, ledger)
        assert running.engine.starts == 1
        await eventually(lambda: running.engine.starts == 2, what="a restart with whole weights")
        await serve_some(ledger, 0, 0)
        assert (await publish(source, 2)).state == "committed"
        await serve_some(ledger, 1, 2)


async def test_in_place_half_written_weights_end_the_engine(redis_db: str, ledger: Ledger) -> None:
    """What runs goes on sampling from weights that are no version: none of it may come out."""
    engine = Torn(tokens_per_s=50)
    async with (
        worker(redis_db, engine=engine) as running,
        publisher(redis_db, mode="in_place") as source,
    ):
        broker = Broker(ledger.redis, "default")
        await broker.enqueue([job(sampling=SamplingParams(max_new_tokens=60))])
        await eventually(lambda: runs(engine))
        report = await publish(source, 1)
        assert report.failures == {running.id: "load: CUDA error"}
        await eventually(lambda: engine.starts == 2, what="a restart with whole weights")
        (reply,) = await wait_replies(broker, 1)
        assert (reply.outcome.versions, reply.outcome.attempt) == ((0,), 2)
        check_scripted(reply.outcome, 3)
        assert (await publish(source, 2)).state == "committed"
        await serve_some(ledger, 1, 2)
