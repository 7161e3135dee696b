"""What `rolloutmq worker` says before it starts an engine, which takes long."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rolloutmq.messages.errors import ConfigError
from rolloutmq.worker.main import COMPILED, keep_compiled


def told(folder: Path, *command: str, hub: int = 1, **more: str) -> str:
    """What this command says where the hub is at this port of this machine. Nobody listens at port 1."""
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    surroundings |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub}", "HF_HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=surroundings | more
    )
    return done.stderr


def worker(folder: Path, model: str, *options: str, hub: int = 1, **more: str) -> str:
    command = ("-m", "rolloutmq.ops.entry", "worker", "--log-level", "error", "--model", model, *options)
    return told(folder, *command, hub=hub, **more)


@pytest.mark.parametrize("model", ["/no/such/model", "./no/such/model"])
def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path, model: str) -> None:
    said = worker(tmp_path, model)
    assert said.startswith(f"ConfigError: model='{model}': there is no such folder or file, and the hub has no such")
    assert "Give a folder with the model, or its name on the hub; `rolloutmq tiny-model" in said


@pytest.mark.parametrize("below", ["", "/x", "/x/y"])
def test_snapshots_that_can_be_no_folder_are_refused_by_name(tmp_path: Path, below: str) -> None:
    folder = "/dev/null" + below
    said = worker(tmp_path, str(tmp_path), "--snapshots", folder, "--redis", "redis://127.0.0.1:1")
    assert said.startswith(f"ConfigError: snapshots='{folder}': it must be a folder, or become one: ")


@pytest.mark.parametrize("more", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_a_hub_that_cannot_be_asked_is_said_to_be_so(tmp_path: Path, more: dict[str, str]) -> None:
    said = worker(tmp_path, "org/model", **more)
    assert said.startswith(
        "ConfigError: model='org/model': there is no such folder or file, and the hub does not answer ("
    )


def test_a_name_that_the_hub_does_not_have_is_asked_for_once(tmp_path: Path) -> None:
    asked: list[str] = []

    class Hub(SimpleHTTPRequestHandler):
        def log_request(self, *_: object) -> None:
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        said = worker(tmp_path, "org/model", hub=server.server_port)
        server.shutdown()
        thread.join()
    assert said.startswith("ConfigError: model='org/model': there is no such folder or file, and the hub has no such")
    assert [path for path in asked if "org/model" in path] == ["/api/models/org/model"]


def test_what_there_is_or_may_be_is_left_to_the_engine(tmp_path: Path) -> None:
    fetched = tmp_path / "hub" / "models--org--model"
    (fetched / "refs").mkdir(parents=True)
    (fetched / "refs" / "main").write_text("0" * 40)
    (fetched / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (fetched / "snapshots" / ("0" * 40) / "config.json").write_text("{}")
    models = ["org/model", str(tmp_path), "s3://bucket/model"]
    check = f"from rolloutmq.worker.main import check_model\nfor model in {models}: check_model(model)"
    assert told(tmp_path, "-c", check) == ""


def test_what_is_compiled_is_kept_below_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in COMPILED:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    keep_compiled(None)
    assert not (COMPILED.keys() - {"TRITON_CACHE_DIR"}) & os.environ.keys()
    keep_compiled(str(tmp_path / "new"))
    found = {variable: os.environ[variable] for variable in COMPILED}
    assert found.pop("TRITON_CACHE_DIR") == "/mine"
    assert set(found.values()) == {str(tmp_path / "new" / name) for name in COMPILED.values() if name != "triton"}


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache_dir='.*file'"):
        keep_compiled(str(tmp_path / "file"))
