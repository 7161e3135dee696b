"""`rolloutmq exporter --deletion-costs`: a real worker's tokens, told to a server that speaks as Kubernetes' does."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.pools.pool import eventually, status, worker
from support.redis.deployments import Certificates

from rolloutmq import RolloutClient
from rolloutmq.messages import SamplingParams
from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.model import WorkerStatus
from rolloutmq.ops.metrics.deletion_costs import ANNOTATION, DeletionCosts, PodPatches, deletion_cost
from rolloutmq.worker.scripted.engine import ScriptedEngine


class Kubernetes(ThreadingHTTPServer):
    """Takes patches of the pods it has, from whoever has the token. down: it answers 503."""

    daemon_threads = True

    def __init__(self, certificates: Certificates) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificates.server, certificates.key(certificates.server))
        self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.token, self.down = "first", False
        self.pods: dict[str, str] = {}
        self.patches = 0


class _Handler(BaseHTTPRequestHandler):
    server: Kubernetes

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.patches += 1
        found = re.fullmatch(r"/api/v1/namespaces/rollouts/pods/([^/]+)", self.path)
        pod = found[1] if found else ""
        if self.server.down:
            code = 503
        elif self.headers["Authorization"] != f"Bearer {self.server.token}":
            code = 401
        elif self.headers["Content-Type"] != "application/merge-patch+json":
            code = 415
        elif pod not in self.server.pods:
            code = 404
        else:
            assert body == {"metadata": {"annotations": {ANNOTATION: body["metadata"]["annotations"][ANNOTATION]}}}
            self.server.pods[pod] = body["metadata"]["annotations"][ANNOTATION]
            code = 200
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def kubernetes(certificates: Certificates) -> Iterator[Kubernetes]:
    with serving(certificates) as server:
        yield server


@contextmanager
def serving(certificates: Certificates) -> Iterator[Kubernetes]:
    server = Kubernetes(certificates)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def account(certificates: Certificates, tmp_path: Path) -> Path:
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("first\n")
    (folder / "namespace").write_text("rollouts")
    (folder / "ca.crt").write_bytes(certificates.ca.read_bytes())
    return folder


def inside(server: Kubernetes, account: Path) -> PodPatches:
    port = str(server.server_address[1])
    return PodPatches({"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}, account)


async def test_a_worker_that_generates_costs_more_than_an_idle_one(
    redis_db: str, kubernetes: Kubernetes, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-5f7c9-x2k4p")  # in a pod that is the pod's name
    costs = DeletionCosts(inside(kubernetes, account))
    engine, pod = ScriptedEngine(tokens_per_s=2000), socket.gethostname()
    kubernetes.pods = {pod: "", "idle": "", "other-pool": ""}
    async with worker(redis_db, engine=engine, checkpoint_s=0.1), RolloutClient(redis_db) as client:
        handle = await client.submit(token_ids=[1], sampling=SamplingParams(max_new_tokens=100_000))

        async def busy() -> WorkerStatus | None:
            return next((one for one in await client.broker.workers() if one.unfinished_tokens >= 100), None)

        seen = await eventually(busy, what="a heartbeat that tells of saved tokens")
        costs.tell([seen, status("w", host="idle")])
        assert 64 <= int(kubernetes.pods[pod]) <= seen.unfinished_tokens
        assert kubernetes.pods["idle"] == "0"
        assert kubernetes.pods["other-pool"] == ""
        await client.cancel([handle.job_id])

        async def idle() -> bool:
            return all(one.unfinished_tokens == 0 for one in await client.broker.workers())

        await eventually(idle, what="a heartbeat without unfinished samples")


def test_only_changes_are_told_and_a_new_token_is_used(kubernetes: Kubernetes, account: Path) -> None:
    kubernetes.pods = {"a": "", "b": ""}
    costs = DeletionCosts(inside(kubernetes, account))
    costs.tell([status("1", host="a", unfinished_tokens=1000), status("2", host="b")])
    assert (kubernetes.pods, kubernetes.patches) == ({"a": "512", "b": "0"}, 2)
    costs.tell([status("1", host="a", unfinished_tokens=1023), status("2", host="b")])
    assert kubernetes.patches == 2
    (account / "token").write_text("second")
    kubernetes.token = "second"
    costs.tell([status("1", host="a", unfinished_tokens=1024), status("2", host="b")])
    assert (kubernetes.pods, kubernetes.patches) == ({"a": "1024", "b": "0"}, 3)
    costs.tell([status("2", host="b")])
    costs.tell([status("3", host="a", unfinished_tokens=1024), status("2", host="b")])
    assert kubernetes.patches == 4, "a pod that comes back under a name is told of again"


def test_a_host_that_is_no_pod_is_left_alone(kubernetes: Kubernetes, account: Path) -> None:
    kubernetes.pods = {"a": ""}
    costs = DeletionCosts(inside(kubernetes, account))
    workers = [status(host, host=host) for host in ("gone", "../../secrets/x", "a/b", "A", "", "a\r\nX: y", "a")]
    costs.tell(workers)
    costs.tell(workers)
    assert kubernetes.pods == {"a": "0"}
    assert kubernetes.patches == 2, "of those that cannot be pods Kubernetes hears nothing"


def test_an_outage_is_said_once_and_made_up_for(
    kubernetes: Kubernetes, account: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    kubernetes.pods, kubernetes.down = {"a": ""}, True
    costs = DeletionCosts(inside(kubernetes, account))
    for _ in range(3):
        costs.tell([status("1", host="a")])
    assert [record.message.rpartition("status ")[2] for record in caplog.records] == ["503 for pod a"]
    kubernetes.down = False
    costs.tell([status("1", host="a")])
    assert kubernetes.pods == {"a": "0"}
    with serving(certificates) as gone:
        away = DeletionCosts(inside(gone, account))
    away.tell([status("1", host="a")])
    assert "does not answer" in caplog.records[-1].message


def test_a_server_that_is_not_the_clusters_gets_no_token(
    kubernetes: Kubernetes, account: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    (account / "ca.crt").write_bytes(Certificates.make(tmp_path / "other").ca.read_bytes())
    DeletionCosts(inside(kubernetes, account)).tell([status("1", host="a")])
    assert kubernetes.patches == 0
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.records[-1].message


def test_outside_of_a_cluster_it_says_so(account: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--deletion-costs needs a pod .*namespace"):
        PodPatches({"KUBERNETES_SERVICE_HOST": "127.0.0.1"}, tmp_path)
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST is not set"):
        PodPatches({}, account)


@pytest.mark.parametrize(("tokens", "cost"), [(0, 0), (1, 1), (1023, 512), (1024, 1024), (1 << 60, 1 << 30)])
def test_costs_are_powers_of_two_that_kubernetes_takes(tokens: int, cost: int) -> None:
    assert deletion_cost(status("w", unfinished_tokens=tokens)) == cost
