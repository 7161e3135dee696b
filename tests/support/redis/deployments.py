"""The ways people run Redis, small, private and on loopback: replicas, sentinels, clusters, TLS.

Everything dies with the test process (see ops/redis/parent_bound.py) and is gone when its block is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from rolloutmq.messages.errors import RedisUnavailable
from rolloutmq.ops.redis import embedded as embedded_redis
from rolloutmq.ops.redis.embedded import BINARY_VARIABLE, EmbeddedRedis, find_server

# A replica's first sync starts at once, where by default the primary waits 5 s for others to come
# along. It goes straight into memory: by way of a file, Valkey looks once a second whether it is whole.
FAST_SYNC = {
    "repl-diskless-sync-delay": "0",
    "repl-diskless-load": "on-empty-db",
    "repl-ping-replica-period": "1",
}


def soon(condition: Callable[[], Any], timeout: float = 15.0, what: str = "") -> Any:
    """The condition's value as soon as it is truthy; redis errors count as not yet."""
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(redis.exceptions.RedisError):
            if value := condition():
                return value
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.005)


def plain(server: EmbeddedRedis) -> redis.Redis:
    """A plain client, for looking and for operating: one attempt."""
    return redis.Redis(port=server.port, protocol=2, retry=None, socket_timeout=10)


@contextmanager
def replicated(replicas: int = 1, config: Mapping[str, str] | None = None) -> Iterator[list[EmbeddedRedis]]:
    """A primary and its replicas, in sync."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(EmbeddedRedis(config=FAST_SYNC | dict(config or {}))) for _ in range(replicas + 1)
        ]
        for replica in servers[1:]:
            follow(replica, servers[0])
        yield servers


def follow(replica: EmbeddedRedis, primary: EmbeddedRedis) -> None:
    """Make a server the replica of another, and wait until it is in sync."""
    with plain(replica) as client:
        client.replicaof("127.0.0.1", primary.port)
        soon(lambda: client.info("replication")["master_link_status"] == "up", what="the replica's sync")


# --- sentinels -------------------------------------------------------------------------------------------------------


@contextmanager
def sentinel(primary: EmbeddedRedis, *, name: str = "main", replicas: int = 1, more: str = "") -> Iterator[int]:
    """The port of a sentinel that decides alone, and fast; it has seen the primary's replicas. more: of its config."""
    folder = Path(tempfile.mkdtemp(prefix="rolloutmq-sentinel-"))
    port = free_port(embedded_redis.PORTS)
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nprotected-mode no\ndir {folder}\n"
        f"sentinel monitor {name} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {name} 300\nsentinel failover-timeout {name} 3000\n{more}"
    )
    guard = [sys.executable, "-I", "-S", str(Path(embedded_redis.__file__).with_name("parent_bound.py"))]
    process = subprocess.Popen(
        [*guard, str(os.getpid()), str(folder), find_server(), str(config), "--sentinel"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("wb"),
    )
    try:
        with redis.Redis(port=port, protocol=2, retry=None, password=_sentinel_password(more)) as client:
            soon(lambda: len(client.sentinel_slaves(name)) >= replicas, what="the sentinel to see the replicas")
        yield port
    finally:
        process.terminate()
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def _sentinel_password(config: str) -> str | None:
    return next((line.split()[1] for line in config.splitlines() if line.startswith("requirepass ")), None)


def free_port(ports: range) -> int:
    """A port of `ports` that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


# --- cluster ---------------------------------------------------------------------------------------------------------

SLOTS = 16384


@dataclass
class Cluster:
    """Primaries that share the slots evenly. url: names the first two."""

    nodes: list[EmbeddedRedis]
    replicas: list[EmbeddedRedis] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port},127.0.0.1:{self.nodes[1].port}"

    def node_of(self, pool: str) -> EmbeddedRedis:
        """The primary that was given the slot of a pool at the start."""
        return self.nodes[self.slot(pool) * len(self.nodes) // SLOTS]

    @staticmethod
    def slot(pool: str) -> int:
        return redis.crc.key_slot(f"rmq:{{{pool}}}:".encode())

    @staticmethod
    def id(node: EmbeddedRedis) -> str:
        return str(plain(node).execute_command("CLUSTER MYID"), "ascii")

    def add_replica(self, primary: EmbeddedRedis) -> EmbeddedRedis:
        """A replica that takes the primary's place when that is gone; in sync."""
        replica = _cluster_node().start()
        self.replicas.append(replica)
        everybody = [*self.nodes, *self.replicas]
        with plain(replica) as client:
            client.execute_command("CLUSTER MEET", "127.0.0.1", primary.port)
            soon(lambda: len(_known(client)) == len(everybody) and "handshake" not in str(_known(client)))
            soon(lambda: client.execute_command("CLUSTER REPLICATE", self.id(primary)))
            soon(lambda: client.info("replication")["master_link_status"] == "up", what="the replica's sync")
        for node in self.nodes:  # the others vote, so they have to know it as the replica of the primary
            soon(lambda node=node: any("slave" in str(entry) for entry in _known(plain(node))))
        return replica

    def begin_move(self, pool: str, target: EmbeddedRedis) -> None:
        """Open the slot of `pool` for migration to `target`; its keys stay where they are."""
        source, slot = self.node_of(pool), self.slot(pool)
        plain(target).execute_command("CLUSTER SETSLOT", slot, "IMPORTING", self.id(source))
        plain(source).execute_command("CLUSTER SETSLOT", slot, "MIGRATING", self.id(target))

    def move_keys(self, pool: str, target: EmbeddedRedis, count: int = 1 << 20) -> int:
        """Migrate up to `count` keys of the open slot; returns how many were there to migrate."""
        with plain(self.node_of(pool)) as client:
            keys = client.execute_command("CLUSTER GETKEYSINSLOT", self.slot(pool), count)
            if keys:
                client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            return len(keys)

    def end_move(self, pool: str, target: EmbeddedRedis) -> None:
        """The slot is the target's from here on."""
        source = self.node_of(pool)
        for node in [target, source, *(node for node in self.nodes if node not in (target, source))]:
            plain(node).execute_command("CLUSTER SETSLOT", self.slot(pool), "NODE", self.id(target))


@contextmanager
def cluster(primaries: int = 3) -> Iterator[Cluster]:
    """A cluster on loopback that is up."""
    made = Cluster([])
    try:
        made.nodes += [_cluster_node().start() for _ in range(primaries)]
        for number, node in enumerate(made.nodes):
            with plain(node) as client:
                mine = [slot for slot in range(SLOTS) if slot * primaries // SLOTS == number]
                client.execute_command("CLUSTER ADDSLOTS", *mine)
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER MEET", "127.0.0.1", made.nodes[0].port)
        for node in made.nodes:
            with plain(node) as client:
                soon(lambda client=client: b"cluster_state:ok" in _info(client), what="the cluster's start")
                soon(lambda client=client: len(_known(client)) == primaries)
        yield made
    finally:
        for node in [*made.nodes, *made.replicas]:
            node.stop()


def _cluster_node() -> EmbeddedRedis:
    # The cluster's own link listens 10000 above; both below the ports that connections leave from.
    port = free_port(range(15000, 22000))
    settings = {"cluster-enabled": "yes", "cluster-node-timeout": "1000", "cluster-replica-validity-factor": "0"}
    return EmbeddedRedis(port=port, config=FAST_SYNC | settings)


def _info(client: redis.Redis) -> bytes:
    answer = client.execute_command("CLUSTER INFO")
    return answer if isinstance(answer, bytes) else "".join(f"{k}:{v}\n" for k, v in answer.items()).encode()


def _known(client: redis.Redis) -> list[Any]:
    answer = client.execute_command("CLUSTER NODES")
    return list(answer.items()) if isinstance(answer, dict) else answer.splitlines()


# --- TLS -------------------------------------------------------------------------------------------------------------


class NoTls(Exception):
    """This redis-server was built without TLS, or there is no openssl to make certificates with."""


@dataclass(frozen=True)
class Certificates:
    """Files of a certificate authority and of what it has signed. elsewhere: the server's, for another host's name."""

    ca: Path
    server: Path
    elsewhere: Path
    client: Path

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        if shutil.which("openssl") is None:
            raise NoTls("no openssl on PATH to make certificates with")
        ca = folder / "ca.pem"
        _openssl("req", "-x509", *_new_key(folder / "ca"), "-subj", "/CN=test authority", "-days", "2", "-out", str(ca))
        made = {
            name: _signed(folder, name, alternative)
            for name, alternative in (
                ("server", "DNS:localhost,IP:127.0.0.1"), ("elsewhere", "DNS:elsewhere.test"), ("client", "DNS:client"),
            )
        }  # fmt: skip
        return cls(ca, **made)

    def key(self, certificate: Path) -> Path:
        return certificate.with_suffix(".key")


def _new_key(stem: Path) -> list[str]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{stem}.key"]


def _signed(folder: Path, name: str, alternative: str) -> Path:
    stem, out = folder / name, folder / f"{name}.pem"
    (folder / f"{name}.ext").write_text(f"subjectAltName={alternative}\n")
    _openssl("req", *_new_key(stem), "-subj", f"/CN={name}", "-out", f"{stem}.csr")
    authority = ["-CA", str(folder / "ca.pem"), "-CAkey", str(folder / "ca.key"), "-CAcreateserial", "-days", "2"]
    _openssl("x509", "-req", "-in", f"{stem}.csr", *authority, "-extfile", f"{stem}.ext", "-out", str(out))
    return out


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)


def with_tls() -> str | None:
    """A server that can do TLS. Those that cannot say so; this one misses its certificate."""
    folders = os.get_exec_path()
    names = [shutil.which("redis-server", path=folder) for folder in folders]
    for binary in dict.fromkeys([find_server(), *filter(None, names)]):
        told = subprocess.run([binary, "--port", "0", "--tls-port", "1"], capture_output=True, text=True, check=False)
        if "tls-cert-file" in told.stdout + told.stderr:
            return binary
    return None


@contextmanager
def tls_server(certificates: Certificates, certificate: Path, **config: str) -> Iterator[int]:
    """The TLS port of a server that shows `certificate`; raises NoTls if there is none that can do TLS.

    The tests' own binary is tried first, then every one on PATH.
    """
    port = free_port(embedded_redis.PORTS)
    settings = {
        "tls-port": str(port), "tls-cert-file": str(certificate), "tls-key-file": str(certificates.key(certificate)),
        "tls-ca-cert-file": str(certificates.ca), "tls-auth-clients": "no",
    }  # fmt: skip
    names, folders = ("redis-server", "valkey-server"), os.get_exec_path()
    on_path = (shutil.which(name, path=folder) for name in names for folder in folders)
    for binary in dict.fromkeys([find_server(), *filter(None, on_path)]):
        with contextlib.ExitStack() as stack:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(BINARY_VARIABLE, binary)
                try:
                    stack.enter_context(EmbeddedRedis(config=settings | config))
                except RedisUnavailable as error:
                    if "Bad directive" in str(error) or "Failed finding TLS support" in str(error):
                        continue
                    raise
            yield port
            return
    raise NoTls(f"{find_server()} was built without TLS, and so was every redis-server on PATH")
