"""Claims become samples as soon as each can, whatever its neighbours have to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rolloutmq.messages import GenerateJob, encode
from rolloutmq.messages.broker.lease import Claim
from rolloutmq.messages.errors import RequestRefused
from rolloutmq.producer.data import medium
from rolloutmq.worker.engine.protocol import EngineInfo
from rolloutmq.worker.jobs.held import HeldJob
from rolloutmq.worker.jobs.intake import FETCHES, admit_all
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


async def test_jobs_whose_media_are_fetched_keep_nobody_waiting(server: Server) -> None:
    late, plain, none = claim(server.url("/late")), claim(), claim(server.url("/none"))
    pair = [claim(server.url("/together")) for _ in range(2)]  # one after the other would never end
    order = []
    async for one, found in admit_all([late, *pair, plain, none], INFO, NoTokenizer(), HERE):
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
    found = {one.job_id: job async for one, job in admit_all(claims, INFO, NoTokenizer(), HERE)}
    assert found.keys() == {one.job_id for one in claims}
    assert all(isinstance(job, HeldJob) for job in found.values())


async def test_without_hosts_nothing_is_fetched(server: Server) -> None:
    [(_, refused)] = [each async for each in admit_all([claim(server.url("/image"))], INFO, NoTokenizer())]
    assert isinstance(refused, RequestRefused)
    assert "--media-host" in str(refused)


async def test_the_time_that_a_fetch_takes_is_the_jobs_own(server: Server) -> None:
    one = replace(claim(server.url("/late")), left_s=60.0)
    began = time.monotonic()
    threading.Timer(0.5, server.late.set).start()
    [(_, held)] = [each async for each in admit_all([one], INFO, NoTokenizer(), HERE)]
    assert time.monotonic() - began >= 0.5
    assert isinstance(held, HeldJob)
    assert held.deadline is not None
    assert held.deadline - began < 60.3
