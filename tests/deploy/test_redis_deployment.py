"""The Redis of deploy/kubernetes: its own start command, configuration, users and certificates, on real servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError
from support.manifests import Manifests, needs_kubectl, rendered
from support.pools.pool import worker
from support.redis.deployments import free_port, soon, with_tls
from support.specimens.messages import tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import connect
from rolloutmq.ops.metrics.reading import PoolReader
from rolloutmq.ops.redis import embedded, parent_bound
from rolloutmq.ops.redis.embedded import find_server

pytestmark = needs_kubectl
PRIMARY, REPLICA = "redis-0", "redis-1"


class Servers:
    """The pods redis-0 and redis-1, as processes on loopback. primary: what the ConfigMap says.

    tls: with a server that can do it, which may be older than the image's: Redis 7.0 has no WAITAOF. Else without TLS.
    """

    def __init__(self, manifests: Manifests, folder: Path, binary: str, tls: bool) -> None:
        pod = manifests.pods["redis"]
        self._command = [*pod.container["command"], *pod.container["args"]]
        self.primary = manifests.environment(pod)["PRIMARY"]
        self._ports = {name: free_port(embedded.PORTS) for name in (PRIMARY, REPLICA)}
        self._folder, self._tls = folder, tls
        (folder / "bin").mkdir()
        (folder / "bin" / "valkey-server").symlink_to(binary)
        mounts = pod.mounts
        config = manifests.values("ConfigMap", mounts["/etc/redis/redis.conf"]["configMap"]["name"])["redis.conf"]
        for name, text in manifests.values("Secret", mounts["/etc/redis/secret"]["secret"]["secretName"]).items():
            (folder / name).write_text(text.replace(" +waitaof", "") if tls else text)
        self._config = config.replace("/etc/redis/secret", str(folder))
        if not tls:
            self._config = re.sub(r"^(tls-.*|port 0)\n", "", self._config, flags=re.MULTILINE)
        client = manifests.pods["worker"].mounts["/etc/rolloutmq"]["secret"]["secretName"]
        self._urls = manifests.values("Secret", client)

    @contextmanager
    def running(self, pod: str) -> Iterator[None]:
        """The pod's own command, with this host's paths and ports, until the block is left."""
        (self._folder / pod).mkdir(exist_ok=True)
        config = self._folder / f"{pod}.conf"
        assert "\ndir /data\n" in self._config
        own = f"{'tls-port' if self._tls else 'port'} {self._ports[pod]}\nbind 127.0.0.1\nrepl-diskless-sync-delay 0\n"
        config.write_text(self._config.replace("\ndir /data\n", f"\ndir {self._folder / pod}\n") + own)
        *shell, script = self._command
        for there, here in (
            ("/etc/redis/redis.conf", str(config)),
            ('"$PRIMARY.redis-pods" 6379', f"127.0.0.1 {self._ports[self.primary]}"),
        ):
            assert there in script
            script = script.replace(there, here)
        path = f"{self._folder / 'bin'}:{os.environ['PATH']}"
        guard = [sys.executable, "-I", "-S", str(Path(parent_bound.__file__)), str(os.getpid()), ""]
        with (self._folder / f"{pod}.log").open("ab") as log:
            process = subprocess.Popen(
                [*guard, *shell, script],
                env=os.environ | {"HOSTNAME": pod, "PRIMARY": self.primary, "PATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        try:
            soon(lambda: self.client(pod, "probe", "probe").ping(), what=f"{pod} answers its probe")
            yield
        finally:
            process.terminate()
            process.communicate()

    def client(self, pod: str, user: str, password: str) -> redis.Redis:
        options = {"ssl": True, "ssl_ca_certs": str(self._folder / "ca.crt")} if self._tls else {}
        return redis.Redis(
            "localhost", self._ports[pod], username=user, password=password, protocol=2, retry=None, **options
        )

    def url(self, role: str, pod: str = PRIMARY) -> str:
        """The role's, as its Secret has it, with this host's address and file."""
        url = self._urls[role]
        for there, here in (
            ("@redis.rolloutmq.svc:6379/", f"@localhost:{self._ports[pod]}/"),
            ("/etc/rolloutmq", str(self._folder)),
        ):
            assert there in url
            url = url.replace(there, here)
        if self._tls:
            return url.replace("&durable=disk", "")
        return re.sub(r"^rediss(.*)\?ssl_ca_certs=[^&]*&", r"redis\1?", url)

    def password(self, user: str) -> str:
        (found,) = re.findall(rf"^user {user} on >(\w+) ", (self._folder / "users.acl").read_text(), re.MULTILINE)
        return str(found)


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    return Manifests(rendered(tmp_path_factory.mktemp("rendered")))


@pytest.fixture(params=["tls", "plain"])
def servers(request: pytest.FixtureRequest, manifests: Manifests, tmp_path: Path) -> Servers:
    binary = with_tls() if request.param == "tls" else find_server()
    if binary is None:
        pytest.skip("no redis-server here can do TLS")
    return Servers(manifests, tmp_path, binary, request.param == "tls")


async def test_each_role_does_its_work_and_the_replica_takes_over(servers: Servers) -> None:
    with servers.running(PRIMARY), servers.running(REPLICA):
        follower = servers.client(REPLICA, "operator", servers.password("operator"))
        soon(lambda: follower.info("replication")["master_link_status"] == "up", what="the replica's sync")
        safe = "&min_replicas=1" if "?" in servers.url("worker") else "?min_replicas=1"
        async with RolloutClient(servers.url("producer") + safe, client_id="trainer") as client:
            async with worker(servers.url("worker") + safe):
                await client.submit_many([tokens(n=2) for _ in range(5)])
                assert len([one async for one in client.results(30)]) == 10
                async with RolloutClient(servers.url("operator")) as exporters:
                    await exporters.submit(tokens())
                    assert len([one async for one in exporters.results(30)]) == 1
            left = await client.submit(tokens())
        async with connect(servers.url("operator"), pool="default") as operator:
            reading = await PoolReader(operator, "default").read()
            assert (sum(reading.pool.load.queued), reading.pool.memory > 0) == (1, True)
    servers.primary = REPLICA  # what an operator writes into the ConfigMap; and the Service points there
    with servers.running(REPLICA):
        async with (
            worker(servers.url("worker", REPLICA)),
            RolloutClient(servers.url("producer", REPLICA), client_id="trainer") as client,
        ):
            (result,) = [one async for one in client.results(30)]
            assert result.job_id == left.job_id


def test_nobody_else_gets_in(servers: Servers) -> None:
    with servers.running(PRIMARY):
        for user, password in (("default", ""), ("worker", "wrong"), ("producer", servers.password("worker"))):
            with pytest.raises(redis.exceptions.AuthenticationError):
                servers.client(PRIMARY, user, password).ping()
        for user, command in (
            ("probe", ["GET", "rmq:{default}:load"]),
            ("worker", ["FLUSHALL"]),
            ("worker", ["GET", "rmq:{other}:load"]),
            ("producer", ["CONFIG", "GET", "*"]),
            ("operator", ["SHUTDOWN"]),
            ("replica", ["GET", "x"]),
        ):
            password = "probe" if user == "probe" else servers.password(user)
            with pytest.raises(NoPermissionError):
                servers.client(PRIMARY, user, password).execute_command(*command)
