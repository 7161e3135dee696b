"""The gateway's server ends as balancers and people want it to, and speaks TLS."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from support.http import served
from support.pools.pool import eventually
from support.redis.deployments import Certificates

from rolloutmq.messages import ConfigError
from rolloutmq.ops.http import HttpLimits, HttpServer, Tls

PROCESS = """
import asyncio, sys
from support.http import Held, application
from rolloutmq.ops.http import HttpLimits
from rolloutmq.ops.http import HttpServer
held = Held()
server = HttpServer(application(held), "127.0.0.1", 0, limits=HttpLimits(drain_notice_s={notice}, drain_s={drain}))
print(server.port, flush=True)

async def main():
    asyncio.get_running_loop().add_reader(sys.stdin, held.let_go.set)
    await server.serve()

asyncio.run(main())
print("ended", flush=True)
"""
TESTS = Path(__file__).parents[2]


@asynccontextmanager
async def process(notice: float, drain: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    code = PROCESS.format(notice=notice, drain=drain)
    here = {**os.environ, "PYTHONPATH": ":".join([str(TESTS), *sys.path])}
    pipe = subprocess.PIPE
    running = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=pipe, stdout=pipe, env=here)
    assert running.stdout is not None
    try:
        port = int(await running.stdout.readline())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            await eventually(lambda: _ready(client))
            yield running, client
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


async def _ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.ConnectError:
        return False


async def _gone(client: httpx.AsyncClient) -> bool:
    try:
        async with httpx.AsyncClient(base_url=client.base_url) as new:
            await new.get("/health")
    except httpx.TransportError:
        return True
    return False


async def _draining(client: httpx.AsyncClient) -> bool:
    return (await client.get("/health")).json() == {"ready": False, "reason": "draining"}


async def test_sigterm_is_told_to_balancers_first_and_then_requests_end() -> None:
    async with process(notice=1.0, drain=60) as (running, client):
        held = asyncio.create_task(client.get("/held"))
        await eventually(lambda: _run(client, held))
        running.send_signal(signal.SIGTERM)
        await eventually(lambda: _draining(client))
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/v1/chat/completions", content=b"abc")).json() == {"length": 3}  # still served
        await eventually(lambda: _gone(client))
        assert not held.done()
        assert running.stdin is not None
        running.stdin.write(b"let go")
        assert (await held).json() == {"held": True}
        assert running.stdout is not None
        assert await running.stdout.readline() == b"ended\n"
        assert await running.wait() == 0


async def test_the_drain_is_bounded_and_who_is_cut_off_is_told() -> None:
    async with process(notice=0.0, drain=1) as (running, client):
        held = asyncio.create_task(client.get("/held"))
        stream = asyncio.create_task(client.get("/events?endless"))
        await eventually(lambda: _run(client, held, stream))
        running.send_signal(signal.SIGTERM)
        answer = await held
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert '"code":"shutting_down"' in (await stream).text
        assert await running.wait() == 0


async def _run(client: httpx.AsyncClient, *tasks: asyncio.Task[httpx.Response]) -> bool:
    assert not any(one.done() for one in tasks)
    return (await client.get("/health")).headers["x-running"] == str(len(tasks))


async def test_sigint_gives_no_notice_and_a_second_signal_no_time() -> None:
    async with process(notice=600.0, drain=600) as (running, client):
        held = asyncio.create_task(client.get("/held"))
        await eventually(lambda: _run(client, held))
        running.send_signal(signal.SIGINT)
        await eventually(lambda: _gone(client))
        assert running.returncode is None
        running.send_signal(signal.SIGINT)
        assert await running.wait() == 0
        assert (await held).json()["error"]["code"] == "shutting_down"
        assert running.stdout is not None
        assert await running.stdout.readline() == b"ended\n"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_tls_of_1_2_or_newer(certificates: Certificates) -> None:
    tls = Tls(certificates.server, certificates.key(certificates.server))
    trusting = ssl.create_default_context(cafile=certificates.ca)
    async with served(tls=tls) as running:
        url = f"https://localhost:{running.server.port}"
        async with httpx.AsyncClient(base_url=url, verify=trusting) as client:
            assert (await client.get("/health")).json() == {"ready": True}
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(certificates.ca)
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(base_url=url, verify=old) as client:
                await client.get("/health")
        connection = await running.connection()  # who speaks no TLS gets no answer, and harms nobody
        await connection.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        assert await connection.closed()
        async with httpx.AsyncClient(base_url=url, verify=trusting) as client:
            assert (await client.get("/health")).status_code == 200


async def test_only_clients_with_a_certificate(certificates: Certificates) -> None:
    tls = Tls(certificates.server, certificates.key(certificates.server), certificates.ca)
    async with served(HttpLimits(), tls) as running:
        url = f"https://localhost:{running.server.port}"
        nobody = ssl.create_default_context(cafile=certificates.ca)
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(base_url=url, verify=nobody) as client:
                await client.get("/health")
        known = ssl.create_default_context(cafile=certificates.ca)
        known.load_cert_chain(certificates.server, certificates.key(certificates.server))
        async with httpx.AsyncClient(base_url=url, verify=known) as client:
            assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("name", ["certfile", "keyfile", "client_ca"])
def test_files_that_cannot_be_used_are_named(name: str, certificates: Certificates, tmp_path: Path) -> None:
    files = {
        "certfile": certificates.server,
        "keyfile": certificates.key(certificates.server),
        "client_ca": certificates.ca,
    }
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    for wrong in (broken, tmp_path / "absent.pem"):
        with pytest.raises(ConfigError, match=re.escape(f"{name}={wrong}")):
            HttpServer(None, "127.0.0.1", 0, tls=Tls(**{**files, name: wrong}))  # type: ignore[arg-type]
