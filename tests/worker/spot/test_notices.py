"""Notices of a pre-emption, read from metadata services that behave as the clouds' do, and from some that do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, get_args

import pytest
from aiohttp import web
from support.pools.clouds import PlayedCloud, Trouble, played_cloud
from support.pools.pool import eventually

from rolloutmq.messages import ConfigError
from rolloutmq.worker.spot import Cloud, notices_of, wait_for_notice
from rolloutmq.worker.spot.metadata import MOST_BYTES

CLOUDS = get_args(Cloud)


@pytest.fixture
async def cloud() -> AsyncIterator[PlayedCloud]:
    async with played_cloud() as played:
        yield played


def waiting(name: Cloud, cloud: PlayedCloud) -> asyncio.Task[str]:
    notices = notices_of(name)
    notices.pause_s = 0.01
    return asyncio.create_task(wait_for_notice(notices, cloud.url))


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_notice_is_heard_when_it_comes(cloud: PlayedCloud, name: Cloud) -> None:
    waits = waiting(name, cloud)
    await eventually(lambda: cloud.asked >= 2)
    assert not waits.done()
    cloud.notice()
    assert await waits


@pytest.mark.parametrize("name", CLOUDS)
async def test_a_notice_that_came_before_is_heard(cloud: PlayedCloud, name: Cloud) -> None:
    cloud.notice()
    assert await waiting(name, cloud)


async def test_a_long_poll_is_not_asked_again_and_again(cloud: PlayedCloud) -> None:
    waits = waiting("gcp", cloud)
    await eventually(lambda: cloud.asked == 2)  # how it is now, and when that changes
    cloud.notice()
    await waits
    assert cloud.asked == 2


async def test_an_expired_token_is_replaced(cloud: PlayedCloud) -> None:
    waits = waiting("aws", cloud)
    await eventually(lambda: cloud.asked >= 1)
    cloud.expire_tokens()
    cloud.notice()
    assert await waits == "terminate at '2017-09-18T08:22:00Z'"
    assert cloud.tokens == 2


async def test_events_of_other_machines_and_other_kinds_are_none(cloud: PlayedCloud) -> None:
    cloud.events += [
        {"EventType": "Preempt", "Resources": ["workers_4"]},
        {"EventType": "Reboot", "Resources": ["workers_3"]},
        {"EventType": "Preempt", "Resources": "workers_3"},
        {"EventType": "Preempt"},
        "Preempt",
    ]
    waits = waiting("azure", cloud)
    await eventually(lambda: cloud.asked >= 2)
    assert not waits.done()
    cloud.notice()
    assert await waits


async def test_only_googles_own_service_is_believed(cloud: PlayedCloud) -> None:
    async def somebody_else(_: web.Request) -> web.StreamResponse:
        return web.Response(text="TRUE")

    cloud.troubles.append(somebody_else)
    waits = waiting("gcp", cloud)
    await eventually(lambda: cloud.asked >= 1)
    assert not waits.done()
    waits.cancel()


def says(body: bytes | str, **more: Any) -> Trouble:
    async def answer(_: web.Request) -> web.StreamResponse:
        raw = body.encode() if isinstance(body, str) else body
        return web.Response(body=raw, headers={"Metadata-Flavor": "Google"}, **more)

    return answer


async def breaks_off(request: web.Request) -> web.StreamResponse:
    request.transport.abort()
    return web.Response()


async def says_nothing(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


async def never_ends(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Metadata-Flavor": "Google"})
    await answer.prepare(request)
    while True:
        await answer.write(b"TRUE" * 4096)


async def trickles(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Metadata-Flavor": "Google"})
    await answer.prepare(request)
    while True:
        await answer.write(b" ")
        await asyncio.sleep(0.01)


async def sends_elsewhere(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound(f"http://{request.host}/elsewhere")


async def with_a_line_break(request: web.Request) -> web.StreamResponse:
    return web.Response(text="token\r\nHost: elsewhere")


TROUBLES = {
    "error": says("", status=500),
    "forbidden": says("", status=403),
    "empty": says(""),
    "garbage": says(b"\xff\xfe\x00 \x1b[31m"),
    "half": says('{"action": '),
    "deep": says("[" * 30_000 + "]" * 30_000),
    "list": says("[1, 2]"),
    "number": says('{"action": 7, "Events": 7}'),
    "another": says('{"action": "dance", "Events": [null, 3, [], {"EventType": []}]}'),
    "huge": says("TRUE" * MOST_BYTES),
    "zipped": says(b"\x1f\x8b" + b"\x00" * 64),
    "breaks_off": breaks_off,
    "says_nothing": says_nothing,
    "never_ends": never_ends,
    "trickles": trickles,
    "sends_elsewhere": sends_elsewhere,
    "with_a_line_break": with_a_line_break,
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("name", CLOUDS)
async def test_no_answer_ends_or_stalls_the_wait(
    cloud: PlayedCloud, name: Cloud, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.worker.spot.metadata.TIMEOUT_S", 0.1)
    cloud.troubles += [TROUBLES[trouble]] * 3  # to each of the questions, whichever comes first
    waits = waiting(name, cloud)
    await eventually(lambda: cloud.asked >= 1)
    assert not cloud.troubles
    assert not waits.done()
    cloud.notice()
    if name == "azure":  # which is asked for the machine's name now
        cloud.troubles.append(TROUBLES[trouble])
    assert await waits


async def test_a_service_that_is_away_is_asked_until_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    async with played_cloud() as gone:
        url = gone.url
    notices = notices_of("aws")
    notices.pause_s = 0.001
    waits = asyncio.create_task(wait_for_notice(notices, url))
    await eventually(lambda: "asking again" in caplog.text)
    await asyncio.sleep(0.02)  # it has been asked more than once by now
    assert not waits.done()
    assert caplog.text.count("asking again") == 1
    waits.cancel()


def test_without_aiohttp_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolloutmq.worker.spot.notices.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="spot='gcp' needs aiohttp"):
        notices_of("gcp")
