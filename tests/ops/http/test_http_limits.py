"""The gateway's server against clients that send too much, too slowly, or nothing at all."""

from __future__ import annotations

import asyncio
import logging
import socket

import httpx
import pytest
from support.http import Running, served
from support.pools.pool import eventually

from rolloutmq.messages import ConfigError
from rolloutmq.ops.http import HttpLimits, HttpServer, Refused

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"


async def idle(server: Running) -> None:
    """Nothing runs any more, and nobody is connected."""
    await eventually(lambda: not server.server.server_state.connections and not server.server.server_state.tasks)


async def test_a_body_up_to_the_limit_is_read_and_a_longer_one_is_413_before_it_is_there() -> None:
    async with served(HttpLimits(max_body_bytes=1000)) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            fits = await client.post("/v1/chat/completions", content=b"x" * 1000)
            assert fits.json() == {"length": 1000}
            long = await client.post("/v1/chat/completions", content=b"x" * 1001)
            assert (long.status_code, long.json()["error"]["code"]) == (413, "request_too_large")
        connection = await running.connection()
        await connection.send(POST + b"Content-Length: 1000000000000\r\n\r\n")
        assert (await connection.answer())[0] == 413
        connection.writer.close()
        await idle(running)


async def test_a_body_in_chunks_is_413_as_soon_as_it_is_too_long() -> None:
    async with served(HttpLimits(max_body_bytes=1000)) as running:
        connection = await running.connection()
        await connection.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            await connection.send(b"190\r\n" + b"x" * 400 + b"\r\n")
        status, headers, body = await connection.answer()  # its end was never sent
        assert (status, headers["content-type"]) == (413, "application/json")
        assert body["error"] == {
            "message": "More than 1000 bytes of body.", "type": "invalid_request_error", "param": None,
            "code": "request_too_large",
        }  # fmt: skip
        await connection.send(b"0\r\n\r\n" + GET)  # what was left of it is not taken for a request
        assert (await connection.answer())[2] == {"ready": True}
        connection.writer.close()


async def test_what_is_sent_on_and_on_after_the_answer_is_cut_off() -> None:
    async with served(HttpLimits(max_body_bytes=1000)) as running:
        connection = await running.connection()
        await connection.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")

        async def on_and_on() -> None:
            while True:
                await connection.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")

        with pytest.raises(ConnectionError):
            await on_and_on()
        await idle(running)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: h\r\n" + b"".join(b"X-%d: v\r\n" % i for i in range(101)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: h\r\nX: " + b"v" * 5000 + b"\r\n\r\n",
        b"GET /health?" + b"q" * 5000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    ],
    ids=["many", "long", "query"],
)
async def test_a_head_that_is_too_large_is_431(head: bytes) -> None:
    async with served(HttpLimits(max_header_bytes=4000)) as running:
        connection = await running.connection()
        await connection.send(head)
        status, _, body = await connection.answer()
        assert (status, body["error"]["code"]) == (431, "header_too_large")


async def test_a_head_without_end_is_431() -> None:
    async with served(HttpLimits(max_header_bytes=4000)) as running:
        connection = await running.connection()
        await connection.send(b"GET /health HTTP/1.1\r\nX: ")
        for _ in range(5):
            await connection.send(b"v" * 1000)
        assert (await connection.answer())[0] == 431
        assert await connection.closed()
        await idle(running)


async def test_who_sends_a_head_or_a_body_too_slowly_is_told_408_and_cut_off() -> None:
    """Each byte in time does not help: the whole has to be."""
    async with served(HttpLimits(header_s=0.3, body_s=0.3)) as running:
        for begun in (b"GET /health HT", POST + b"Content-Length: 9\r\n\r\nab"):
            connection = await running.connection()
            await connection.send(begun)

            async def drip(into: asyncio.StreamWriter) -> None:
                while True:
                    into.write(b"x")
                    await asyncio.sleep(0.15)

            dripping = asyncio.create_task(drip(connection.writer))
            status, headers, body = await connection.answer()
            dripping.cancel()
            assert (status, headers["connection"], body["error"]["code"]) == (408, "close", "timeout")
            assert await connection.closed()
        await idle(running)


async def test_who_connects_and_sends_nothing_is_cut_off_without_an_answer() -> None:
    async with served(HttpLimits(header_s=0.1)) as running:
        connection = await running.connection()
        assert await connection.answer() == (0, {}, b"")


async def test_a_connection_that_is_kept_may_be_slow_between_requests_but_not_within_one() -> None:
    async with served(HttpLimits(header_s=0.1, keep_alive_s=600)) as running:
        connection = await running.connection()
        for _ in range(2):
            await connection.send(GET)
            assert (await connection.answer())[0] == 200
            assert len(running.server.server_state.connections) == 1
            await asyncio.sleep(0.3)  # three times what a head may take
        await connection.send(GET[:10])
        assert (await connection.answer())[0] == 408


async def test_a_kept_connection_without_requests_is_closed() -> None:
    async with served(HttpLimits(keep_alive_s=0)) as running:
        connection = await running.connection()
        await connection.send(GET)
        assert (await connection.answer())[0] == 200
        assert await connection.closed()


async def test_who_does_not_read_an_answer_is_cut_off() -> None:
    async with served(HttpLimits(write_s=0.3)) as running:
        connection = await running.connection()
        await connection.send(b"GET /large HTTP/1.1\r\nHost: h\r\n\r\n")
        await eventually(lambda: running.server.server_state.connections)
        await idle(running)  # nothing was read


async def test_a_request_past_its_deadline_is_504_and_a_stream_ends_with_the_error() -> None:
    async with served(HttpLimits(request_s=0.3)) as running, httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.get("/held")
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        stream = await client.get("/events?endless")
        first, last = stream.text.split("\n\n")[:2]
        assert first == "data: 0"
        assert '"code":"timeout"' in last
        assert running.held.running == 0


async def test_who_hangs_up_is_noticed() -> None:
    async with served() as running:
        connection = await running.connection()
        await connection.send(b"GET /held HTTP/1.1\r\nHost: h\r\n\r\n")
        await eventually(lambda: running.held.running)
        connection.writer.close()
        await eventually(lambda: running.held.hung_up)
        await idle(running)


async def test_more_connections_than_allowed_are_told_503() -> None:
    async with served(HttpLimits(max_connections=2)) as running:
        held = [await running.connection() for _ in range(2)]
        await eventually(lambda: len(running.server.server_state.connections) == 2)
        status, headers, body = await (await running.connection()).answer()
        assert (status, headers["retry-after"], body["error"]["code"]) == (503, "1", "overloaded")
        held.pop().writer.close()
        await eventually(lambda: len(running.server.server_state.connections) == 1)
        connection = await running.connection()
        await connection.send(GET)
        assert (await connection.answer())[0] == 200


async def test_what_the_application_refuses_and_how_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as running, httpx.AsyncClient(base_url=running.url) as client:
        refused = await client.post("/refuses")
        assert (refused.status_code, refused.headers["retry-after"]) == (409, "2")
        assert refused.json()["error"] == {
            "message": "Not now.", "type": "invalid_request_error", "param": None, "code": "conflict",
        }  # fmt: skip
        failed = await client.post("/fails")
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
        assert "what the log says" not in failed.text
    assert "what the log says" in caplog.text


async def test_the_log_has_each_request_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with served() as running, httpx.AsyncClient(base_url=running.url) as client:
        headers = {"Authorization": "Bearer SECRET", "X-API-Key": "SECRET", "Cookie": "SECRET"}
        await client.post("/v1/chat/completions?key=SECRET", headers=headers, content=b"SECRET")
        connection = await running.connection()
        await connection.send(b"GET /health SECRET\r\n\r\n")
        assert (await connection.answer())[0] == 400
    lines = [one.getMessage() for one in caplog.records if one.name == "rolloutmq.ops.http.access"]
    assert lines[0].startswith('127.0.0.1 - "POST /v1/chat/completions" 200, 6 B in, ')
    assert lines[1] == "127.0.0.1 - refused: 400 Invalid HTTP request received."
    assert [one for one in caplog.records if one.name != "httpx" and "SECRET" in one.getMessage()] == []


async def test_many_idle_connections_do_not_keep_others_out() -> None:
    """Slowloris: hundreds that drip, beside one that is served all the time."""
    async with served(HttpLimits(header_s=1.0)) as running, httpx.AsyncClient(base_url=running.url) as client:
        slow = [await running.connection() for _ in range(200)]
        for one in slow:
            await one.send(b"GET /health HTTP/1.1\r\nX: ")
        for _ in range(20):
            assert (await client.get("/health")).status_code == 200
        assert {(await one.answer())[0] for one in slow} == {408}


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"cannot listen on 127\."):
        HttpServer(None, "127.0.0.1", taken.getsockname()[1])  # type: ignore[arg-type]


async def test_openais_client_raises_its_own_errors_for_what_is_refused() -> None:
    """By status, with code, message and how long to wait."""
    import openai  # noqa: PLC0415 – a second

    kinds = {401: openai.AuthenticationError, 403: openai.PermissionDeniedError, 413: openai.APIStatusError}
    kinds |= {409: openai.ConflictError, 429: openai.RateLimitError, 503: openai.InternalServerError}
    for status, kind in kinds.items():
        answer = Refused(status, "why", "Because.", param="field", retry_after_s=1.2)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=answer))
        async with openai.AsyncOpenAI(api_key="k", base_url="http://h/v1", max_retries=0, http_client=http) as client:
            with pytest.raises(kind) as caught:
                await client.chat.completions.create(model="m", messages=[])
        assert (caught.value.status_code, caught.value.code, caught.value.param) == (status, "why", "field")
        assert "Because." in str(caught.value)
        assert caught.value.response.headers["retry-after"] == "2"
