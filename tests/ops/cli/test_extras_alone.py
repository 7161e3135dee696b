"""Each extra is enough for its commands, and a command that lacks a library says in one line what brings it."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from support.extras import command, hidden

REDIS = ["--redis", "{url}"]


def run(extras: list[str], words: list[str], url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    told = [word.format(url=url, folder=folder) for word in words]
    return subprocess.run(command(extras, *told), capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        *(("cli", [word, *REDIS]) for word in ("status", "doctor")),
        *(("cli", [word, "list", *REDIS]) for word in ("dead", "replies", "weights")),
        *(("cli", [*words, *REDIS]) for words in (["scale", "--explain"], ["top", "--once"])),
        ("ops", ["ops", "list", *REDIS]),
        ("ops", ["doctor", *REDIS]),
        ("metrics", ["status", *REDIS]),
    ],
)  # fmt: skip
def test_a_command_runs_with_its_extra_alone(extra: str, words: list[str], redis_url: str, tmp_path: Path) -> None:
    ran = run([extra], words, redis_url, tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("extra", "words", "says"),
    [
        ("cli", ["ops", "list", *REDIS], "rolloutmq[ops]"),
        ("cli", ["exporter", *REDIS], "rolloutmq[metrics]"),
        ("cli", ["gateway", *REDIS], "rolloutmq[gateway]"),
        ("cli", ["dashboard", *REDIS], "rolloutmq[dashboard]"),
        ("replay", ["report", "{folder}/none"], "there is no such folder"),
        ("dashboard", ["report", "{folder}/none"], "there is no such folder"),
        ("cli", ["tiny-model", "{folder}/model"], "rolloutmq[sglang]"),
        ("cli", ["worker", "--model", "{folder}", *REDIS], "rolloutmq["),
        ("cli", ["demo"], "rolloutmq["),
        ("replay", ["replay", "tokens", "--journal", "{folder}/none"], "there is no such folder"),
        ("parquet", ["journal", "export", "{folder}/none", "{folder}/out.parquet"], "there is no such folder"),
        ("worker", ["worker", "--model", "{folder}", *REDIS], "rolloutmq[sglang]"),
    ],
)
def test_what_is_missing_is_one_line(extra: str, words: list[str], says: str, redis_url: str, tmp_path: Path) -> None:
    ran = run([extra], words, redis_url, tmp_path)
    assert ran.returncode == 2, ran.stderr
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "ModuleNotFoundError" not in ran.stderr


def test_the_exporter_serves_with_metrics_alone(redis_url: str) -> None:
    """The client's image has no more."""
    told = command(["metrics"], "exporter", "--redis", redis_url, "--port", "0")
    with subprocess.Popen(told, stderr=subprocess.PIPE, text=True) as exporter:
        assert exporter.stderr is not None
        line = exporter.stderr.readline()
        exporter.kill()
    assert "metrics on port" in line


def test_what_an_extra_does_not_bring_is_hidden() -> None:
    assert {"torch", "psutil", "rq", "zstandard"} <= set(hidden(("cli",)))
    assert not {"typer", "redis", "numpy", "rich", "yaml"} & set(hidden(("cli",)))
    assert "rq" not in hidden(("ops",))


def test_the_dashboard_serves_with_its_extra_alone(redis_url: str) -> None:
    told = command(["dashboard"], "dashboard", "--redis", redis_url, "--port", "0", "--json")
    with subprocess.Popen(told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        url = json.loads(served.stdout.readline())["url"]
        assert httpx.get(url + "state").status_code == 200
        served.send_signal(signal.SIGTERM)
        assert served.wait(30) == 0


def test_the_gateway_serves_with_its_extra_alone(redis_url: str) -> None:
    told = command(["gateway"], "gateway", "--redis", redis_url, "--port", "0", "--json")
    with subprocess.Popen(told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        url = json.loads(gateway.stdout.readline())["url"]
        answer = httpx.get(f"{url.removesuffix('/v1')}/health", timeout=30)
        gateway.send_signal(signal.SIGINT)
        _, said = gateway.communicate(timeout=60)
    assert (answer.status_code, answer.json()["ready"]) == (503, False)  # there is no worker
    assert gateway.returncode == 0, said
    assert "Traceback" not in said
