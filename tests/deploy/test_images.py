"""deploy/containers, built: the client's image on a base that debootstrap makes, and its commands started in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from support.manifests import ROOT
from support.pools.pool import worker
from support.redis.deployments import free_port, soon

from rolloutmq.ops.redis import embedded
from rolloutmq.ops.redis.embedded import EmbeddedRedis

MISSING = [name for name in ("buildah", "debootstrap") if not shutil.which(name)] + ["root"] * (os.geteuid() != 0)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(MISSING), reason=f"images are built with buildah and debootstrap, by root: no {MISSING}"),
]
BASE, IMAGE, LIMIT_MB = "localhost/base", "localhost/rolloutmq-client", 200
# How this host reaches its packages, if in a way of its own.
PIP = (Path("/etc/pip.conf"), Path("/etc/ssl/certs/ca-certificates.crt"))


class Builder:
    """buildah, with a storage of its own, and a copy of the checkout."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        shutil.copytree(
            ROOT, self.tree, ignore=shutil.ignore_patterns(".venv", ".git", "out", "__pycache__", ".*_cache")
        )
        (folder / "tmp").mkdir()
        paths = f'graphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
        (folder / "storage.conf").write_text(f'[storage]\ndriver = "overlay"\n{paths}')
        # RES_OPTIONS keeps tests from asking for names; packages come from somewhere.
        self._environment = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"} | {
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "BUILDAH_ISOLATION": "chroot",
            "TMPDIR": str(folder / "tmp"),
        }
        if self.call("buildah", "from", "scratch", check=False).returncode:
            (folder / "storage.conf").write_text(f'[storage]\ndriver = "vfs"\n{paths}')
            told = self.call("buildah", "from", "scratch", check=False)
            if told.returncode:
                pytest.skip(f"buildah cannot work here: {told.stderr.strip()}")

    def call(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, cwd=self.tree, env=self._environment, capture_output=True, text=True, check=False
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done

    def build(self) -> str:
        """`make images`, of the client; returns what buildah said."""
        ours = " ".join(f"--volume {path}:{path}:ro" for path in PIP if path.exists())
        return self.call("make", "images", "IMAGES=client", f"BASE={BASE}", f"BUILD={ours}").stdout

    def megabytes(self, image: str) -> float:
        (told,) = json.loads(self.call("buildah", "images", "--json", image).stdout)
        number, unit = told["size"].split()
        return float(number) * {"KB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]

    def command(self, container: str, url: str, *arguments: str) -> list[str]:
        """What starts the image's program in a container, as the image's user."""
        return ["buildah", "run", "--env", f"ROLLOUTMQ_REDIS={url}", container, "--", "tini", "-s", "--", *arguments]

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    builder = Builder(tmp_path_factory.mktemp("images"))
    builder.call("sh", "deploy/containers/base.sh", BASE)
    builder.build()
    return builder


def test_it_is_small(built: Builder) -> None:
    added = built.megabytes(IMAGE) - built.megabytes(BASE)
    assert 0 < added < LIMIT_MB


def test_a_change_of_the_source_leaves_its_dependencies(built: Builder) -> None:
    (built.tree / "ops" / "entry.py").write_text((built.tree / "ops" / "entry.py").read_text() + "\n# changed\n")
    said = re.sub(r"\[\d/\d\] ", "", built.build())
    steps = {
        step.split("\n")[0].split(": ")[1]: "Using cache" in step for step in said.split("STEP ")[1:] if ": " in step
    }
    (locked,) = [cached for step, cached in steps.items() if " -r /requirements.txt" in step]
    (source,) = [cached for step, cached in steps.items() if " /src " in step]
    assert (locked, source) == (True, False)


async def test_its_commands_start_and_a_job_gets_its_answer(built: Builder) -> None:
    container = built.call("buildah", "from", IMAGE).stdout.strip()
    with EmbeddedRedis() as server:

        async def told(*arguments: str) -> str:
            command = built.command(container, server.url, *arguments)
            return (await asyncio.to_thread(built.call, *command)).stdout

        assert (await told("id", "-u")).strip() == "10001"
        for program in ((), ("worker",), ("exporter",), ("submit",), ("status",)):
            assert "Usage" in await told("rolloutmq", *program, "--help")
        assert "0 problems" in await told("rolloutmq", "doctor")
        async with worker(server.url):
            assert await told("rolloutmq", "generate", "--token-ids", "1,2,3", "--max-new-tokens", "4")
        port = free_port(embedded.PORTS)
        exporter = built.start(*built.command(container, server.url, "rolloutmq", "exporter", "--port", str(port)))
        try:
            await asyncio.to_thread(soon, lambda: "rolloutmq_up 1.0" in page(port), 60, "the exporter's page")
        finally:
            exporter.terminate()
            exporter.wait()


def page(port: int) -> str:
    """What the exporter shows, or nothing yet."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read(), "utf-8")
    return ""
