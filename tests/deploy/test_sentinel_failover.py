"""deploy/sentinel: its own scripts and configuration, as three real servers and three real sentinels on loopback. The
primary is killed while both replicas are behind, and a trainer goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from support.manifests import Manifests, needs_kubectl, rendered
from support.pools.pool import worker
from support.redis.deployments import free_port, soon, with_tls
from support.specimens.messages import tokens

from rolloutmq import JobFailure, RolloutClient, RolloutResult
from rolloutmq.messages.errors import NotReplicated, RedisUnavailable
from rolloutmq.ops.redis import embedded, parent_bound
from rolloutmq.ops.redis.embedded import find_server
from rolloutmq.worker.scripted.engine import ScriptedEngine

CLI = shutil.which("valkey-cli") or shutil.which("redis-cli")
pytestmark = [needs_kubectl, pytest.mark.skipif(CLI is None, reason="no valkey-cli or redis-cli to ask sentinels with")]
SERVERS, SENTINELS = ("redis-0", "redis-1", "redis-2"), ("sentinel-0", "sentinel-1", "sentinel-2")
FAILOVER_S = 60.0
ADMIN = "user admin on >admin ~* &* +@all\n"


class Pods:
    """The pods of redis and sentinel, as processes. tls: with a server that can do it, else without."""

    def __init__(self, manifests: Manifests, folder: Path, binary: str, tls: bool) -> None:
        self._folder, self._tls = folder, tls
        self._ports = {name: free_port(embedded.PORTS) for name in SERVERS + SENTINELS}
        (folder / "bin").mkdir()
        (folder / "bin" / "valkey-server").symlink_to(binary)
        (folder / "bin" / "valkey-cli").symlink_to(str(CLI))
        mounts = manifests.pods["redis"].mounts
        self._files = {
            path: manifests.values(*named)
            for path, named in (
                ("/etc/redis", ("ConfigMap", mounts["/etc/redis/redis.conf"]["configMap"]["name"])),
                ("/etc/sentinel", ("ConfigMap", mounts["/etc/sentinel"]["configMap"]["name"])),
                ("/etc/redis/secret", ("Secret", mounts["/etc/redis/secret"]["secret"]["secretName"])),
            )
        }
        self._files["/etc/redis/secret"]["users.acl"] += ADMIN
        self._urls = manifests.values(
            "Secret", manifests.pods["worker"].mounts["/etc/rolloutmq"]["secret"]["secretName"]
        )
        self._commands = {
            kind: [*manifests.pods[kind].container["command"], *manifests.pods[kind].container["args"]]
            for kind in ("redis", "sentinel")
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def _here(self, text: str, pod: str) -> str:
        """With this host's names, ports and folders in place of the pod's."""
        folder = self._folder / pod
        text = re.sub(r"(redis-\d)\.redis-pods\.NAMESPACE\.svc 6379", lambda m: f"localhost {self._ports[m[1]]}", text)
        text = re.sub(
            r"(sentinel-\d)\.sentinels\.\S+?\.svc([ :])26379", lambda m: f"localhost{m[2]}{self._ports[m[1]]}", text
        )
        for there, here in (
            ("$HOSTNAME.redis-pods.$NAMESPACE.svc 6379", f"localhost {self._ports[pod]}" if pod else ""),
            ("$HOSTNAME.sentinels.$NAMESPACE.svc", "localhost"),
            ("/etc/redis/secret", f"{folder}/etc/redis/secret"),
            ("/etc/redis/redis.conf", f"{folder}/etc/redis/redis.conf"),
            ("/etc/sentinel", f"{folder}/etc/sentinel"),
            ("/data", f"{folder}/data"),
            (" +waitaof", "" if self._tls else " +waitaof"),
        ):
            text = text.replace(there, here)
        return text

    def _lay(self, pod: str) -> None:
        (self._folder / pod / "data").mkdir(parents=True, exist_ok=True)
        for path, files in self._files.items():
            (self._folder / pod / path[1:]).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                made = self._here(text, pod)
                if name.endswith(".conf") and path != "/etc/redis/secret":
                    made = self._listening(made, pod)
                if name.endswith(".sh") and not self._tls:
                    made = re.sub(r"--tls --cacert \S+", "", made)
                (self._folder / pod / path[1:] / name).write_text(made)

    def _listening(self, config: str, pod: str) -> str:
        if not self._tls:
            config = re.sub(r"^(tls-.*|port 0)\n", "", config, flags=re.MULTILINE)
        config = re.sub(r"^tls-port .*\n", "", config, flags=re.MULTILINE)
        own = f"{'tls-port' if self._tls else 'port'} {self._ports[pod]}\nbind 127.0.0.1\n"
        return own + config + ("repl-diskless-sync-delay 0\n" if pod in SERVERS else "")

    def start(self, pod: str) -> None:
        """The pod's own command; whatever the volume holds from before is there."""
        if not (self._folder / pod).exists():
            self._lay(pod)
        *shell, script = self._commands[pod.split("-", maxsplit=1)[0]]
        path = f"{self._folder / 'bin'}:{os.environ['PATH']}"
        guard = [sys.executable, "-I", "-S", str(Path(parent_bound.__file__)), str(os.getpid()), ""]
        with (self._folder / f"{pod}.log").open("ab") as log:
            self._processes[pod] = subprocess.Popen(
                [*guard, *shell, self._here(script, pod)],
                env=os.environ | {"HOSTNAME": pod, "NAMESPACE": "rolloutmq", "PATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def kill(self, pod: str) -> None:
        """SIGKILL of the pod's server."""
        process = self._processes.pop(pod)
        process.send_signal(signal.SIGUSR1)
        process.communicate()

    @contextmanager
    def running(self) -> Iterator[None]:
        """All six, in step: one primary, two replicas, three sentinels that know each other."""
        try:
            for pod in SERVERS + SENTINELS:
                self.start(pod)
            soon(lambda: self.roles() == ["master", "slave", "slave"], 60, "a primary with two replicas")
            for pod in SENTINELS:
                soon(
                    lambda pod=pod: (it := self.known(pod))["num-slaves"] == it["num-other-sentinels"] == 2,
                    60,
                    f"{pod} to know the others",
                )
            yield
        finally:
            for process in self._processes.values():
                process.terminate()
            for process in self._processes.values():
                process.communicate()

    def client(self, pod: str, user: str = "admin", password: str = "admin") -> redis.Redis:
        options = (
            {"ssl": True, "ssl_ca_certs": str(self._folder / pod / "etc/redis/secret/ca.crt")} if self._tls else {}
        )
        return redis.Redis("localhost", self._ports[pod], username=user, password=password, retry=None, **options)

    def known(self, pod: str) -> Any:
        """The primary, as this sentinel knows it."""
        (password,) = re.findall(
            r"^user peer on >(\w+)", self._files["/etc/redis/secret"]["sentinel.conf"], re.MULTILINE
        )
        with self.client(pod, "peer", password) as asked:
            (main,) = asked.sentinel_masters().values()
        return main

    def secret(self, file: str, before: str) -> str:
        """What stands behind `before` in a file of the Secret redis-server."""
        (found,) = re.findall(rf"^{before}(\w+)", self._files["/etc/redis/secret"][file], re.MULTILINE)
        return str(found)

    def roles(self) -> list[str]:
        """Of the servers that run, each connected to its primary; the primary first."""
        found = []
        for pod in SERVERS:
            if pod in self._processes:
                with self.client(pod) as asked:
                    told = asked.info("replication")
                if told["role"] == "master" or told["master_link_status"] == "up":
                    found.append(str(told["role"]))
        return sorted(found)

    def primary(self) -> str:
        """The one that says so of itself."""
        for pod in SERVERS:
            with contextlib.suppress(redis.exceptions.RedisError):
                if pod in self._processes and self.client(pod).info("replication")["role"] == "master":
                    return pod
        return ""

    def cut(self, pods: list[str], password: str) -> None:
        """Replicas get nothing more from their primary: their link is closed, and opens no more with this password."""
        for pod in pods:
            with self.client(pod) as asked:
                asked.config_set("masterauth", password)
                asked.execute_command("CLIENT", "KILL", "TYPE", "master")

    def url(self, role: str) -> str:
        """The role's, as its Secret has it, with this host's addresses."""
        url = self._here(self._urls[role], "").replace("/etc/rolloutmq", str(self._folder / "redis-0/etc/redis/secret"))
        if self._tls:
            return url.replace("&durable=disk", "")
        return re.sub(r"&ssl_ca_certs=[^&]*", "", url.replace("rediss+", "redis+"))


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    return Manifests(rendered(tmp_path_factory.mktemp("rendered"), components="../sentinel", way="sentinel"))


class Trainer:
    """Submits prompts until each has its samples. accepted: jobs for which `submit` returned. lost: as it was told."""

    def __init__(self, client: RolloutClient, prompts: int) -> None:
        self._client, self._wanted = client, list(range(prompts))
        self.accepted: set[str] = set()
        self.results: dict[str, int] = {}
        self.lost: dict[str, str] = {}
        self.trained: set[int] = set()

    async def submit(self, count: int) -> None:
        """So many prompts more, at once."""
        await asyncio.gather(*(self._again(self._wanted.pop()) for _ in range(count)))

    async def _again(self, prompt: int) -> None:
        job = tokens(metadata={"prompt": prompt})
        while True:
            with contextlib.suppress(NotReplicated, RedisUnavailable):
                await self._client.submit(job)
                break
        self.accepted.add(job.id)

    async def take(self) -> None:
        """Until nothing is open: what is lost is submitted once more."""
        async for outcome in self._client.results(120):
            if isinstance(outcome, RolloutResult):
                self.results[outcome.job_id] = self.results.get(outcome.job_id, 0) + 1
                self.trained.add(outcome.metadata["prompt"])
            else:
                assert isinstance(outcome, JobFailure)
                self.lost[outcome.job_id] = outcome.cause
                await self._again(outcome.metadata["prompt"])


@pytest.mark.parametrize(
    ("tls", "waits"), [(False, True), (False, False), pytest.param(True, True, marks=pytest.mark.slow)]
)
async def test_a_trainer_goes_on_when_its_primary_is_killed(
    manifests: Manifests, tmp_path: Path, tls: bool, waits: bool
) -> None:
    """With min_replicas=1, as secrets.sh has it, no accepted job is lost. Without it each loss is told, and generated
    again."""
    binary = with_tls() if tls else find_server()
    if binary is None:
        pytest.skip("no redis-server here can do TLS")
    pods = Pods(manifests, tmp_path, binary, tls)
    prompts = 120

    def url(role: str) -> str:
        return pods.url(role) if waits else pods.url(role).replace("&min_replicas=1", "")

    with pods.running():
        async with (
            worker(url("worker"), engine=ScriptedEngine(tokens_per_s=20), max_running=4, lease_s=15),
            RolloutClient(url("producer"), client_id="trainer") as client,
        ):
            trainer = Trainer(client, prompts)
            await trainer.submit(60)
            taking = asyncio.create_task(trainer.take())
            first = pods.primary()
            behind = [pod for pod in SERVERS if pod != first]
            pods.cut(behind, "wrong")
            submitting = asyncio.create_task(trainer.submit(60))
            done, _ = await asyncio.wait({submitting}, timeout=2 if waits else 30)
            assert bool(done) is not waits  # without a replica's word nothing is accepted
            killed = time.monotonic()
            pods.kill(first)
            pods.cut(behind, pods.secret("replica.conf", "masterauth "))
            await asyncio.to_thread(soon, lambda: pods.primary() in behind, FAILOVER_S, "a replica's promotion")
            promoted, done_before = time.monotonic(), len(trainer.results)
            pods.start(first)
            await asyncio.to_thread(soon, lambda: len(trainer.results) > done_before, FAILOVER_S, "a result")
            goes_on = time.monotonic()
            await submitting
            await asyncio.wait_for(taking, 120)
            await asyncio.to_thread(
                soon, lambda: pods.roles() == ["master", "slave", "slave"], FAILOVER_S, "the old primary as a replica"
            )
            assert pods.primary() in behind
        took = f"{promoted - killed:.1f} s to the promotion, {goes_on - killed:.1f} s to the next result"
        print(f"tls {tls}, min_replicas {int(waits)}: {len(trainer.lost)} of {len(trainer.accepted)} lost, {took}")
        assert trainer.trained == set(range(prompts))
        assert trainer.results.keys() | trainer.lost.keys() == trainer.accepted
        assert not trainer.results.keys() & trainer.lost.keys()
        assert set(trainer.results.values()) == {1}
        if waits:
            assert trainer.lost == {}
        else:
            assert trainer.lost
            assert all("lost" in cause for cause in trainer.lost.values())


@pytest.mark.slow
def test_all_servers_start_again_at_once_as_what_they_were(manifests: Manifests, tmp_path: Path) -> None:
    """After their primary was missed, so the sentinels are about to promote one that may have less."""
    binary = with_tls()
    if binary is None:
        pytest.skip("no redis-server here can do TLS")
    pods = Pods(manifests, tmp_path, binary, tls=True)
    with pods.running():
        first = pods.primary()
        with pods.client(first) as asked:
            asked.set("rmq:{default}:there", "1")
        for pod in SERVERS:
            pods.kill(pod)
        for pod in SENTINELS:
            soon(lambda pod=pod: pods.known(pod)["is_sdown"], FAILOVER_S, f"{pod} to miss the primary")
        for pod in SERVERS:
            pods.start(pod)
        soon(lambda: pods.roles() == ["master", "slave", "slave"], FAILOVER_S, "a primary with its replicas")
        assert pods.primary() == first
        with pods.client(first) as asked:
            assert asked.get("rmq:{default}:there") == b"1"
