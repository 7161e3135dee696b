"""`rolloutmq control`: what it prints, as text and as JSON, and its exit code."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rolloutmq.messages.errors import InvalidField
from rolloutmq.messages.model.command_params import ACTIONS
from rolloutmq.ops.cli.control import COMMANDS, _file_name
from rolloutmq.ops.cli.main import app
from rolloutmq.producer import BlockingPoolControl
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer
from rolloutmq.worker.worker import Worker


class Serving:
    """A worker on an event loop in a thread, as the command line has none of its own."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.worker: Worker | None = None
        self.up = threading.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self._run(url),), daemon=True)
        self.thread.start()
        assert self.up.wait(20)

    async def _run(self, url: str) -> None:
        self.worker = Worker(WorkerConfig(redis_url=url, drain_s=2.0), ScriptedEngine(lora=True), NoTokenizer())
        serving = asyncio.create_task(self.worker.run())
        await self.worker.joined.wait()
        self.up.set()
        await serving

    def stop(self) -> None:
        if self.thread.is_alive() and self.worker is not None:
            self.loop.call_soon_threadsafe(self.worker.drain)
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def serving(redis_db: str) -> Iterator[Serving]:
    made = Serving(redis_db)
    yield made
    made.stop()


def call(url: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["control", *arguments, "--redis", url, "--timeout", "10"])


def test_every_action_has_a_command() -> None:
    assert sorted(action for words in COMMANDS.values() for action in words.values()) == sorted(ACTIONS)


def test_text_json_and_exit_codes(redis_db: str, serving: Serving, tmp_path: Path) -> None:
    worker_id = serving.worker.worker_id  # type: ignore[union-attr]
    done = call(redis_db, "version", "--json")
    assert (done.exit_code, json.loads(done.output)[worker_id]["result"]["version"]) == (0, 0)
    for arguments in (
        ("pause", "--mode", "retract"),
        ("pause", "--mode", "abort"),
        ("resume",),
        ("abort",),
        ("abort", "--no-drop"),
        ("sleep", "--tag", "kv_cache"),
        ("wake", "--tag", "kv_cache"),
        ("cache", "flush"),
        ("version", "set", "5"),
        ("audit-weights",),
        ("adapters",),
        ("profile", "start", "--folder", str(tmp_path / "traces")),
        ("profile", "stop", "--out", str(tmp_path / "here")),
        ("journal", "on", str(tmp_path / "journal")),
        ("journal", "off"),
    ):
        done = call(redis_db, *arguments, "--worker", worker_id)
        assert done.exit_code == 0, (arguments, done.output)
        assert worker_id in done.output
    (trace,) = (tmp_path / "here" / worker_id).iterdir()
    assert trace.read_bytes() == (tmp_path / "traces" / trace.name).read_bytes()
    for arguments, why in (
        (("cache", "clear"), "RequestRefused: clear_storage"),
        (("version", "set", "2"), "above 5"),
        (("load", str(tmp_path / "none"), "9"), "NoSuchSnapshot"),
        (("adapters", "load", "a", "1", str(tmp_path / "none")), "NoSuchSnapshot"),
        (("adapters", "unload", "a"), "none"),
        (("parameter", "a", "--truncate", "3"), "InvalidField: name='a'"),
    ):
        done = call(redis_db, *arguments)
        assert (done.exit_code, why in done.output) == (1, True), (arguments, done.output)
        told = json.loads(call(redis_db, *arguments, "--json").output)[worker_id]
        assert (told["ok"], bool(told["kind"])) == (False, True)
    for arguments in (
        ("sleep", "--tag", "lungs"),
        ("pause", "--mode", "gently"),
        ("save", "relative"),
        ("cache",),
        ("journal", "on"),
        ("journal", "off", str(tmp_path)),
    ):
        assert call(redis_db, *arguments).exit_code == 2
    for arguments, why in (
        (("version", "5"), "is not one of 'show', 'set'"),
        (("version", "set"), "version="),
        (("adapters", "unload", "a", "1", "/there"), "control adapters unload takes no path"),
        (("profile", "stop", "--steps", "3"), "control profile stop takes no steps"),
    ):
        done = call(redis_db, *arguments)
        assert (done.exit_code, why in done.output) == (2, True), (arguments, done.output)
    assert "an absolute path: each worker looks for it on its own host" in call(redis_db, "load", "here", "9").output
    nobody = call(redis_db, "version", "--worker", "nobody")
    assert (nobody.exit_code, "no worker of that name" in nobody.output) == (1, True)
    assert call(redis_db, "stop", "--drain", "0").exit_code == 0
    serving.thread.join(20)
    assert call(redis_db, "version").exit_code == 1


def test_the_same_without_asyncio(redis_db: str, serving: Serving) -> None:
    with BlockingPoolControl(redis_db) as control:
        assert control.version().ok
        assert list(control.versions().values()) == [0]
        assert control.pause("finish", timeout=10.0).ok
        assert control.resume().ok
        with pytest.raises(InvalidField):
            control.sleep(["lungs"])
        with pytest.raises(AttributeError, match="fly"):
            control.fly()
        control.close()


@pytest.mark.parametrize("told", ["../../elsewhere", "..", "/etc/passwd", ""])
def test_what_a_worker_calls_itself_leads_nowhere(told: str, tmp_path: Path) -> None:
    assert (tmp_path / _file_name(told)).resolve().parent == tmp_path.resolve()
