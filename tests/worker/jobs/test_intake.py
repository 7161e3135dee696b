"""Claims become samples as soon as each can, whatever its neighbours have to wait for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.pools.pool import Running, eventually, wait_replies, worker
from support.specimens.messages import SHORT, job

from rolloutmq.messages import Broker, GenerateJob, Partial, Segment, encode
from rolloutmq.messages.broker.lease import Claim
from rolloutmq.messages.errors import RequestRefused
from rolloutmq.producer.data import medium
from rolloutmq.worker.engine.protocol import EngineInfo
from rolloutmq.worker.jobs import SampleRun
from rolloutmq.worker.jobs.held import HeldJob
from rolloutmq.worker.jobs.intake import FETCHES, MustFetch, admit_all, admit_fetched
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer

PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)
HERE = frozenset({"127.0.0.1"})
INFO = EngineInfo("sglang", "0.5.17", "m", "bfloat16", "cuda", 8, 512, features=frozenset({"media"}))


class Server(ThreadingHTTPServer):
    """Answers /together when two have asked for it, and /late when it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.together, self.late = threading.Barrier(2, timeout=20), threading.Event()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/together":
            self.server.together.wait()
        elif self.path == "/late":
            self.server.late.wait(20)
        self.send_response(404 if self.path == "/none" else 200)
        self.send_header("Content-Length", str(len(PNG)))
        self.end_headers()
        self.wfile.write(PNG)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.late.set()
        made.shutdown()
        thread.join()


def claim(*urls: str, **fields: Any) -> Claim:
    media = [medium("image", url, urls="worker") for url in urls]
    made = GenerateJob(**({"token_ids": [1, 2, 3]} | fields), media=media)
    return Claim(made.id, 1, 1, 0.0, None, encode(made))


async def admitted(claims: list[Claim], hosts: frozenset[str] = HERE) -> AsyncIterator[tuple[Claim, Any]]:
    """Each claim with what became of it, in the order in which that was known."""
    later = []
    async for one, found in admit_all(claims, INFO, NoTokenizer()):
        if isinstance(found, MustFetch):
            later.append((one, found))
        else:
            yield one, found

    async def fetched(one: Claim, found: MustFetch) -> tuple[Claim, Any]:
        return one, await admit_fetched(one, found, INFO, NoTokenizer(), hosts)

    for done in asyncio.as_completed([fetched(*one) for one in later]):
        yield await done


async def test_jobs_whose_media_are_fetched_keep_nobody_waiting(server: Server) -> None:
    late, plain, none = claim(server.url("/late")), claim(), claim(server.url("/none"))
    pair = [claim(server.url("/together")) for _ in range(2)]  # one after the other would never end
    order = []
    async for one, found in admitted([late, *pair, plain, none]):
        order.append(one.job_id)
        if len(order) == 4:
            server.late.set()
        if one is none:
            assert isinstance(found, RequestRefused)
            assert "404" in str(found)
            continue
        assert isinstance(found, HeldJob), found
        assert [each.data for each in found.job.media] == ([] if one is plain else [PNG])  # type: ignore[union-attr]
        assert len(found.samples) == 1
    assert order[0] == plain.job_id
    assert order[-1] == late.job_id
    assert sorted(order) == sorted(each.job_id for each in (late, *pair, plain, none))


async def test_more_than_are_fetched_at_once_come_all_the_same(server: Server) -> None:
    claims = [claim(server.url("/image")) for _ in range(3 * FETCHES)]
    found = {one.job_id: job async for one, job in admitted(claims)}
    assert found.keys() == {one.job_id for one in claims}
    assert all(isinstance(job, HeldJob) for job in found.values())


async def test_without_hosts_nothing_is_fetched(server: Server) -> None:
    [(_, refused)] = [each async for each in admitted([claim(server.url("/image"))], frozenset())]
    assert isinstance(refused, RequestRefused)
    assert "--media-host" in str(refused)


async def test_the_time_that_a_fetch_takes_is_the_jobs_own(server: Server) -> None:
    one, began = replace(claim(server.url("/image")), left_s=60.0), time.monotonic() - 30.0
    [(_, later)] = [each async for each in admit_all([one], INFO, NoTokenizer())]
    assert isinstance(later, MustFetch)
    held = await admit_fetched(one, MustFetch(later.job, began), INFO, NoTokenizer(), HERE)
    assert held.deadline == began + 60.0


class Seeing(ScriptedEngine):
    """Takes images, and does not look at them."""

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, features=frozenset({"media"}))


@asynccontextmanager
async def one_is_fetched(url: str, broker: Broker, server: Server) -> AsyncIterator[tuple[Running, GenerateJob]]:
    """A worker that runs one sample at a time, and a job of it whose image does not come until `server.late` is set."""
    slow = job(media=[medium("image", server.url("/late"), urls="worker")], sampling=SHORT)
    async with worker(url, engine=Seeing(), max_running=1, prefetch=0, media_hosts=HERE) as running:
        await broker.enqueue([slow])
        await eventually(lambda: running.worker._claims.aside)
        yield running, slow


async def test_a_slow_address_keeps_no_other_job_from_being_claimed(
    redis_db: str, broker: Broker, server: Server
) -> None:
    async with one_is_fetched(redis_db, broker, server) as (running, slow):
        others = [job(sampling=SHORT) for _ in range(5)]
        await broker.enqueue(others)
        found = await wait_replies(broker, 5)
        assert {reply.outcome.job_id for reply in found} == {one.id for one in others}
        server.late.set()
        *_, last = await wait_replies(broker, 6)
        assert (last.outcome.job_id, last.outcome.ok) == (slow.id, True)
        assert running.worker._claims.aside == []


async def test_a_job_that_is_cancelled_while_it_is_fetched_never_runs(
    redis_db: str, broker: Broker, server: Server
) -> None:
    async with one_is_fetched(redis_db, broker, server) as (running, slow):
        await broker.cancel([slow.id])
        await eventually(lambda: not running.worker._claims.aside)
        server.late.set()
        await broker.enqueue([job(sampling=SHORT)])
        await wait_replies(broker, 2)
        assert running.generation.finished == 1


async def test_a_worker_that_leaves_hands_back_what_it_fetches(redis_db: str, broker: Broker, server: Server) -> None:
    async with one_is_fetched(redis_db, broker, server) as (running, slow):
        await running.stop()
    assert sum((await broker.load()).queued) == 1
    assert await broker.redis.hget(broker.keys.job(slow.id), "c") is None


async def test_what_is_fetched_is_no_stray(redis_db: str, broker: Broker, server: Server) -> None:
    async with one_is_fetched(redis_db, broker, server) as (running, slow):
        for _ in range(3):
            await running.worker._handback.disown(running.worker._lease, True, running.worker._known)
        assert await broker.redis.hget(broker.keys.job(slow.id), "st") == b"r"
        server.late.set()
        await wait_replies(broker, 1)


EXACTLY = {"exact_version": 1, "seed": 7}


@pytest.mark.parametrize(
    ("engine", "fields", "ending", "tokens"),
    [
        ({"deterministic": True}, EXACTLY, False, 0),
        ({"deterministic": True}, EXACTLY, True, 2),
        ({"deterministic": True, "device": "cpu"}, EXACTLY, False, 2),
        ({"deterministic": True}, {"seed": 7}, False, 2),
        ({}, {"exact_version": 1}, False, 2),
    ],
    ids=["reproducible", "it only has to end", "on a CPU", "of any version", "without a seed"],
)
async def test_a_reproducible_sample_starts_over_on_a_gpu(
    engine: dict[str, Any], fields: dict[str, Any], ending: bool, tokens: int
) -> None:
    """Its kernels round differently for what is read and what is generated: going on, it would not be the same."""
    made, piece = job(**fields), Partial(token_ids=[5, 6], logprobs=[-0.5, -0.6], segments=(Segment(1, 2),))
    of = Claim(made.id, 1, 1, 0.0, None, encode(made), partials={0: (encode(piece),)}, ending=ending)
    able = frozenset({"seed"})
    async for _, found in admit_all([of], replace(INFO, features=able, **engine), NoTokenizer()):
        assert isinstance(found, HeldJob), found
        (sample,) = found.samples.values()
        assert isinstance(sample, SampleRun)
        assert len(sample.tokens) == tokens
        assert sample.starts_over is (engine == {"deterministic": True} and fields == EXACTLY)
