"""rediss://: certificates are checked in both directions, and what is wrong with one is told at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pools.pool import pauses, short_retries, worker
from support.redis.deployments import Certificates, NoTls, tls_server
from support.specimens.messages import tokens

from rolloutmq import RolloutClient
from rolloutmq.messages.errors import ConfigError, RedisUnavailable
from rolloutmq.messages.redis import connection
from rolloutmq.messages.redis.connection import connect, ping


@pytest.fixture(scope="module")
def port(certificates: Certificates) -> Iterator[int]:
    """Of a server that anybody who trusts the authority may talk to."""
    try:
        with tls_server(certificates, certificates.server) as opened:
            yield opened
    except NoTls as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def strict_port(certificates: Certificates, port: int) -> Iterator[int]:
    """Of a server that wants a certificate of its clients."""
    with tls_server(certificates, certificates.server, **{"tls-auth-clients": "yes"}) as opened:
        yield opened


async def refused(url: str, complaint: str) -> None:
    """Told as RedisUnavailable."""
    async with connect(url) as client:
        with pytest.raises(RedisUnavailable, match=complaint):
            await ping(client)


async def test_a_pool_through_tls(port: int, certificates: Certificates) -> None:
    url = f"rediss://localhost:{port}/0?ssl_ca_certs={certificates.ca}"
    async with worker(url), RolloutClient(url) as client:
        await client.submit_many([tokens(n=2) for _ in range(10)])
        assert len([one async for one in client.results(10)]) == 20


async def test_an_authority_that_is_not_trusted(
    port: int, certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pauses(monkeypatch)
    await refused(f"rediss://localhost:{port}", "CERTIFICATE_VERIFY_FAILED")
    other = Certificates.make(tmp_path)
    await refused(f"rediss://localhost:{port}?ssl_ca_certs={other.ca}", "CERTIFICATE_VERIFY_FAILED")
    assert made == [], "another attempt could not help"


async def test_the_name_has_to_be_the_servers(
    port: int, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pauses(monkeypatch)
    with tls_server(certificates, certificates.elsewhere) as elsewhere:
        url = f"rediss://localhost:{elsewhere}?ssl_ca_certs={certificates.ca}"
        await refused(url, "Hostname mismatch.*localhost")
        assert made == []
        async with connect(url + "&ssl_check_hostname=false") as client:
            await ping(client)


async def test_a_server_that_wants_a_certificate(
    strict_port: int, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_retries(monkeypatch)
    url = f"rediss://localhost:{strict_port}?ssl_ca_certs={certificates.ca}"
    mine = f"&ssl_certfile={certificates.client}&ssl_keyfile={certificates.key(certificates.client)}"
    async with connect(url + mine) as client:
        await ping(client)
    async with connect(url) as client:
        with pytest.raises(RedisUnavailable, match=r"localhost:\d+.*(certificate required|closed|reset)"):
            await ping(client)


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
def test_files_that_are_not_there(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}: there is no such file"):
        connect(f"rediss://localhost?{option}=/no/such/file")


async def test_a_server_without_tls(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a command and says nothing."""
    short_retries(monkeypatch)
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.2)
    await refused(redis_db.replace("redis://", "rediss://"), "Timeout connecting|no reply within")
