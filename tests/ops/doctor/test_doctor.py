"""`rolloutmq doctor`: what it finds on real servers and on hosts with and without a GPU, and its advice."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tomllib
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from support.pools.fixtures import MakeLease
from support.specimens.messages import job
from typer.testing import CliRunner

from rolloutmq.messages import Broker
from rolloutmq.messages.errors import InvalidField
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.doctor import engine, gpu, host, redis_server
from rolloutmq.ops.doctor.finding import Finding, lines
from rolloutmq.ops.doctor.redis_server import _ways_in, redis_findings
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.sharing import Sharing, Taker

NAMES = {"redis", "redis version", "replication", "durability", "eviction", "memory", "connections", "latency", "clock"}


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


async def of_redis(url: str, pool: str = "default") -> dict[str, Finding]:
    return by_name(await redis_findings(url, pool))


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an nvidia-smi that is this shell script onto the path."""

    def put(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return put


# --- redis ------------------------------------------------------------------------------------------------------------


async def test_a_server_for_trials_has_no_problems(redis_db: str) -> None:
    found = await of_redis(redis_db)
    assert found.keys() > NAMES
    assert {name for name, it in found.items() if it.level == "problem"} == set()
    assert found["durability"].level == "warning"
    assert "no append-only file" in found["durability"].found
    assert found["redis version"].found.startswith(("Redis ", "Valkey "))


@pytest.mark.parametrize(
    ("settings", "name", "level", "says"),
    [
        ({"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}, "eviction", "problem", "allkeys-lru"),
        ({"maxmemory": "0", "maxmemory-policy": "volatile-ttl"}, "eviction", "warning", "volatile-ttl"),
        ({"maxmemory": "100mb"}, "memory", "warning", "of 100 MiB maxmemory"),
        ({"maxmemory": "400000"}, "memory", "problem", "used of 0 MiB maxmemory"),
        ({"maxclients": "50"}, "connections", "warning", "of 50 (maxclients)"),
        ({"appendonly": "yes", "appendfsync": "everysec"}, "durability", "warning", "everysec: a killed server"),
        ({"appendonly": "yes", "appendfsync": "always"}, "durability", "ok", "always"),
        ({"hash-max-ziplist-value": "64"}, "job records", "ok", "64"),
    ],
)
async def test_a_setting_that_matters(settings: dict[str, str], name: str, level: str, says: str) -> None:
    with EmbeddedRedis(config=settings) as server:
        found = (await of_redis(server.url))[name]
    assert (found.level, says in found.found) == (level, True), found
    assert bool(found.advice) == (level != "ok" or name == "job records")


async def test_what_the_url_promises_and_the_server_does_not(redis_db: str) -> None:
    refused = (await of_redis(f"{redis_db}?durable=disk"))["redis"]
    assert refused.level == "problem"
    assert "appendonly yes" in refused.found
    alone = (await of_redis(f"{redis_db}?min_replicas=1"))["replication"]
    assert (alone.level, "min_replicas=1" in alone.found) == ("problem", True)


async def test_a_replica_is_no_place_for_a_pool(redis_server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(redis_server.url) as db:
        db.replicaof("127.0.0.1", "1")
    found = await of_redis(redis_server.url)
    assert found["replication"].level == "problem"


async def test_a_user_who_may_not_look(redis_server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(redis_server.url) as db:
        db.execute_command("ACL", "SETUSER", "some", "on", ">pw", "~*", "+@all", "-config", "-info")
        url = redis_server.url.replace("redis://", "redis://some:pw@")
        assert (await of_redis(url))["redis settings"].level == "warning"
        db.execute_command("ACL", "SETUSER", "some", "+info")
        found = await of_redis(url)
    assert found.keys() > NAMES
    assert "not known" in found["durability"].found or "no append-only" in found["durability"].found


async def test_no_redis_and_a_wrong_password_are_findings_without_the_password(redis_server: EmbeddedRedis) -> None:
    (gone,) = await redis_findings("redis://:secret@127.0.0.1:1/0", "default")
    assert (gone.level, "no Redis at 127.0.0.1:1" in gone.found) == ("problem", True)
    with redis.Redis.from_url(redis_server.url) as db:
        db.config_set("requirepass", "other")
    (refused,) = await redis_findings(redis_server.url.replace("redis://", "redis://:secret@"), "default")
    assert refused.level == "problem"
    assert "secret" not in gone.found + refused.found


def test_tls_and_login() -> None:
    far = by_name(_ways_in(False, ["redis.example"], login=False))
    assert (far["tls"].level, far["login"].level) == ("warning", "warning")
    assert [it.level for it in _ways_in(True, ["redis.example"], login=True)] == ["ok"]
    assert [it.found for it in _ways_in(False, [], login=False)] == ["not needed: Redis is on this host"]


async def test_keys_that_were_set_aside(redis_db: str) -> None:
    with redis.Redis.from_url(redis_db) as db:
        db.hset("rmq:{p}:load", "aside", 3)
    assert (await of_redis(redis_db, "p"))["pool"].level == "warning"


async def test_loads_that_stay_uneven(
    redis_db: str, broker: Broker, joined: MakeLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "LOOK_S", 0.0)
    assert (await of_redis(redis_db))["spread"].found == "no worker has claimed anything"
    full, idle = await joined("full"), await joined("idle")
    held = {full.worker_id: 30, idle.worker_id: 29}

    async def told() -> tuple[str, str]:
        for lease in (full, idle):
            lease.holds = lambda lease=lease: held[lease.worker_id]
            await lease.claim(9, 99, 0)
        found = (await of_redis(redis_db))["spread"]
        return found.level, found.found

    assert await told() == ("ok", "the fullest of 2 workers holds 1.00 times its share")
    held["idle"] = 0
    await broker.enqueue([job(min_version=9)])
    says = "the fullest of 2 workers holds 2.00 times its share, 1 hold less than theirs, and 1 jobs wait"
    assert await told() == ("warning", says)


async def test_loads_that_are_uneven_for_a_moment(
    redis_db: str, joined: MakeLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([Sharing({"w": Taker(30, 39, 0.0, "-", share=share)}) for share in (15.0, 15.0, 30.0)])

    async def look(_: Broker) -> Sharing:
        return next(looks)

    monkeypatch.setattr(redis_server, "LOOK_S", 0.0)
    monkeypatch.setattr(redis_server, "read_sharing", look)
    assert (await of_redis(redis_db))["spread"].level == "ok"
    assert next(looks, None) is None


# --- this host --------------------------------------------------------------------------------------------------------


def of_host(url: str = "redis://127.0.0.1:1", **more: Any) -> dict[str, Finding]:
    settings: dict[str, Any] = {"folders": [], "reach": [], "worker_host": True, "has_gpu": True} | more
    return by_name(host.host_findings(url, **settings))


def test_limits_memory_and_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_host(folders=[tmp_path / "not" / "there"])
    assert {it.level for it in found.values()} <= {"ok", "warning"}
    assert {
        "python",
        "open files",
        "shared memory",
        "temporary files",
        "models",
        "folder",
        "rendezvous",
    } <= found.keys()
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (256, 256))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: usage(64 << 20, 4 << 20, 60 << 20))
    found = of_host(folders=[tmp_path])
    assert {found[it].level for it in ("open files", "shared memory", "temporary files", "models", "folder")} == {
        "problem"
    }
    assert "60 of 64 MiB free" in found["shared memory"].found
    assert all(it.advice for it in found.values() if it.level == "problem")
    assert of_host(has_gpu=False)["shared memory"].level == "warning"
    assert "shared memory" not in of_host(worker_host=False)


@pytest.mark.parametrize("address", [".:29500", "a..b:29500", "x" * 64 + ":29500"])
def test_a_host_that_no_resolver_takes_is_a_finding(address: str) -> None:
    assert of_host(reach=[address])["reach"].level == "problem"


def test_a_folder_that_cannot_be_looked_at_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/" + "x" * 300)  # as with a folder of another user's, the answer is an OSError
    assert of_host()["models"].level == "problem"


def test_a_store_that_is_there_and_one_that_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        assert of_host(reach=[f"127.0.0.1:{port}"])["reach"].level == "ok"
    assert of_host(reach=[f"127.0.0.1:{port}"])["reach"].level == "problem"
    for bad in ("trainer", "trainer:x", ":1", "trainer:70000", "trainer:²"):
        with pytest.raises(InvalidField, match="reach="):
            of_host(reach=[bad])


def test_gpus(smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    smi(
        'case "$1" in --query*) echo "0, NVIDIA H200, 143771, 40000, 0"; echo "1, NVIDIA H200, 143771, 4, 2";\n'
        'echo "2, NVIDIA H200, 143771, 4, [N/A]";; *)\n'
        'echo "| NVIDIA-SMI 570.1  Driver Version: 570.124.06  CUDA Version: 12.8 |";; esac'
    )
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    there, found = gpu.gpu_findings()
    assert there
    assert [it.level for it in found] == ["warning", "problem", "ok", "ok", "warning"]
    assert found[3].found == "570.124.06, for CUDA up to 12.8"


def test_a_driver_that_does_not_answer(smi: Callable[[str], None]) -> None:
    smi('echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18')
    there, (found,) = gpu.gpu_findings()
    assert (there, found.level) == (False, "problem")
    assert "version mismatch" in found.found


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.gpu_findings() == (
        False,
        [Finding("gpu", "ok", "none: nvidia-smi is not there. An engine would run on the CPU")],
    )


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(engine, "version", versions.get)


def test_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    worker_host, found = engine.engine_findings(has_gpu=False)
    assert not worker_host
    assert by_name(found)["engine"].found == "SGLang is not installed: not a worker host"
    complete = {"transformers": "5", "safetensors": "1", "psutil": "7"}
    for release, level in (("0.5.17", "ok"), ("0.5.23.post1", "ok"), ("0.5.16", "problem"), ("0.6.0rc1", "warning")):
        installed(monkeypatch, sglang=release, torch="2.13.0", **complete)
        worker_host, found = engine.engine_findings(has_gpu=False)
        assert (worker_host, found[0].level) == (True, level), release
    installed(monkeypatch, sglang="0.5.20", torch="2.13.0")
    problems = [it for it in engine.engine_findings(has_gpu=False)[1] if it.level == "problem"]
    assert [it.found for it in problems] == ["a worker needs transformers, safetensors, psutil"]


def test_every_optional_part_is_told() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    whole = {"cli", "worker", "sglang", "embedded", "trl", "demo", "docs", "dev"}  # installs, not parts of one
    assert {*engine.OPTIONAL.values()} == project["optional-dependencies"].keys() - whole
    for package, extra in engine.OPTIONAL.items():
        assert any(line.startswith(package) for line in project["optional-dependencies"][extra]), package


@pytest.mark.parametrize(
    ("prints", "levels", "says"),
    [
        (
            'print(\'{"cuda": "12.8", "available": true, "nccl": "2.27.3", "unusable": null}\')',
            ["ok", "ok", "ok"],
            "CUDA 12.8",
        ),
        (
            'print(\'{"cuda": null, "available": false, "nccl": null, "unusable": null}\')',
            ["problem"],
            "built without CUDA, sees no GPU",
        ),
        ("raise ImportError('libcudart.so.12: cannot open')", ["problem"], "libcudart.so.12"),
    ],
)
def test_torch_on_a_gpu_host(prints: str, levels: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_ASK_TORCH", prints)
    installed(monkeypatch, torch="2.13.0")
    found = [it for it in engine.engine_findings(has_gpu=True)[1] if it.name in {"torch", "nccl", "nvrtc"}]
    assert [it.level for it in found] == levels
    assert says in found[0].found


FAKE_TORCH = """
import os, types
class version: cuda = "12.8"
class nccl: version = staticmethod(lambda: (2, 27, 3))
jiterator = types.ModuleType("torch.cuda.jiterator")
def _create_jit_fn(code):
    def launch(tensor):
        assert os.environ["USE_PYTORCH_KERNEL_CACHE"] == "0", "a kernel that is cached says nothing"
        if os.environ["RAISES"]:
            raise RuntimeError(os.environ["RAISES"])
    return launch
jiterator._create_jit_fn = _create_jit_fn
cuda = types.ModuleType("torch.cuda")
cuda.is_available, cuda.nccl, cuda.jiterator = lambda: True, nccl, jiterator
def ones(*_, device):
    return device
"""


@pytest.mark.parametrize(
    ("raises", "level", "says"),
    [
        ("", "ok", "compiles kernels"),
        ("Error in dlopen: libnvrtc.so.12: cannot open shared object file", "problem", "libnvrtc.so.12: cannot open"),
        ("nvrtc: error: failed to open libnvrtc-builtins.so.12.8.", "problem", "libnvrtc-builtins.so.12.8"),
        ("CUDA out of memory. Tried to allocate\n2 MiB", "warning", "could not be tried: CUDA out of memory. Tried to"),
    ],
)
def test_whether_torch_can_compile_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: str, level: str, says: str
) -> None:
    """The question as it is asked, of a torch that answers like one on a host with a GPU."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RAISES", raises)
    installed(monkeypatch, torch="2.13.0")
    found = by_name(engine.engine_findings(has_gpu=True)[1])["nvrtc"]
    assert (found.level, says in found.found) == (level, True), found
    assert ("LD_LIBRARY_PATH" in found.advice) == (level == "problem")


def test_without_a_gpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_ASK_TORCH", "raise SystemExit(1)")
    installed(monkeypatch, torch="2.13.0")
    assert "nvrtc" not in by_name(engine.engine_findings(has_gpu=False)[1])


# --- the command ------------------------------------------------------------------------------------------------------


def test_exit_codes_and_json(redis_db: str) -> None:
    fine = CliRunner().invoke(app, ["doctor", "--redis", redis_db, "--json"])
    found = json.loads(fine.stdout)
    assert fine.exit_code == int(any(it["level"] == "problem" for it in found))
    assert found[0].keys() == {"name", "level", "found", "advice"}
    ill = CliRunner().invoke(app, ["doctor", "--redis", "redis://127.0.0.1:1/0"])
    assert ill.exit_code == 1
    assert ill.stdout.startswith("problem  redis")
    assert "python" in ill.stdout
    wrong = CliRunner().invoke(app, ["doctor", "--redis", "http://h"])
    assert (wrong.exit_code, "ConfigError" in wrong.stderr) == (2, True)


def test_neither_torch_nor_sglang_is_loaded(redis_db: str) -> None:
    code = (
        "import sys; from rolloutmq.ops.cli import app\n"
        f"try: app(['doctor', '--redis', {redis_db!r}])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'sglang', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


def test_lines_are_for_people() -> None:
    told = list(lines([Finding("a", "problem", "x " * 100, "Do\x1b this."), Finding("b", "ok", "fine")]))
    assert told[0].startswith("problem  a")
    assert max(map(len, told)) <= 100
    assert any(line.strip().startswith("-> Do\ufffd this.") for line in told)
    assert told[-1] == "1 problem, 0 warnings, 1 ok"
