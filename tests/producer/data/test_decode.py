"""Ids to text at the client, with a small library or a clear word about which one is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.specimens.messages import job, result
from typer.testing import CliRunner

from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.producer.data import Decoder

TEXT = "Größe: 3 < 4 — ok"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer.json."""
    library = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers  # noqa: PLC0415

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = library.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<end>", *alphabet])}, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def ids(model: Path) -> list[int]:
    from tokenizers import Tokenizer  # noqa: PLC0415

    return Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT).ids


def test_ids_arrays_and_results_become_text(model: Path) -> None:
    for source in (model, model / "tokenizer.json", str(model)):
        assert Decoder(source).decode(ids(model)) == TEXT
    decoder = Decoder(model)
    array = np.array([*ids(model), 0], np.int32)
    assert decoder.decode(array) == TEXT
    assert decoder.decode(array, special=True) == f"{TEXT}<end>"
    done = result(job(), token_ids=ids(model), segments=((0, len(ids(model))),))
    assert decoder.decode_many([done, [], ids(model)]) == [TEXT, "", TEXT]


@pytest.mark.parametrize("wrong", [[[1, 2]], [-1], [0.5], [1 << 40], "abc"])
def test_what_are_no_ids_is_refused_by_name(model: Path, wrong: Any) -> None:
    with pytest.raises(InvalidField, match="token_ids"):
        Decoder(model).decode(wrong)


def test_without_either_library_the_error_says_what_to_install(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"rolloutmq\[text\]"):
        Decoder(model).decode([1])


def test_a_folder_without_a_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        Decoder(tmp_path).decode([1])


@pytest.fixture
def hub(model: Path) -> Iterator[ThreadingHTTPServer]:
    """A hub with one model, org/model, as far as its own client asks for a tokenizer."""
    content = (model / "tokenizer.json").read_bytes()

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/api/models/org/model": json.dumps({"id": "org/model"}).encode()}
            known["/org/model/resolve/main/tokenizer.json"] = content
            body = known.get(self.path, b"")
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def decoded(name: str, ids: list[int], port: int, cache: Path) -> subprocess.CompletedProcess[str]:
    """What the command does that asks the hub at this port."""
    command = [sys.executable, "-m", "rolloutmq.ops.entry", "decode", "--model", name, *map(str, ids)]
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    surroundings |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings)


def test_a_name_on_the_hub_is_fetched_once_and_an_unknown_one_refused(
    hub: ThreadingHTTPServer, model: Path, tmp_path: Path
) -> None:
    found = decoded("org/model", ids(model), hub.server_port, tmp_path)
    assert (found.returncode, found.stdout) == (0, TEXT + "\n"), found.stderr
    again = decoded("org/model", ids(model), 1, tmp_path)
    assert (again.returncode, again.stdout) == (0, TEXT + "\n"), again.stderr
    wrong = decoded("org/other", [1], hub.server_port, tmp_path)
    assert wrong.returncode == 2
    assert "no tokenizer could be loaded from org/other: there is no such folder or file, and" in wrong.stderr


def test_a_hub_that_cannot_answer_is_asked_once(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    asked: list[str] = []
    hub.RequestHandlerClass.do_GET = hub.RequestHandlerClass.do_HEAD = (  # type: ignore[attr-defined]
        lambda handler: (asked.append(handler.path), handler.send_error(503))
    )
    failed = decoded("org/model", [1], hub.server_port, tmp_path)
    assert failed.returncode == 2
    assert failed.stderr.startswith(
        "ConfigError: no tokenizer could be loaded from org/model: there is no such folder or file, and the hub does "
        "not answer ("
    )
    assert len([path for path in asked if "org/model" in path]) == 1


def test_what_is_neither_a_folder_nor_a_file_is_not_read() -> None:
    with pytest.raises(ConfigError, match="no tokenizer could be loaded from /dev/zero: it is neither"):
        Decoder("/dev/zero").decode([1])


def test_the_producer_install_stays_light() -> None:
    code = (
        "import sys, rolloutmq, rolloutmq.producer.data, rolloutmq.producer.calls, rolloutmq.producer.openai; "
        "print([n for n in ('tokenizers', 'transformers', 'torch', 'yaml', 'PIL', 'sglang') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


def test_the_command_decodes_arguments_and_files(model: Path, tmp_path: Path) -> None:
    from rolloutmq.ops.cli.main import app  # noqa: PLC0415

    runner = CliRunner()
    given = [str(one) for one in ids(model)]
    shown = runner.invoke(app, ["decode", "--model", str(model), *given])
    assert (shown.exit_code, shown.stdout) == (0, TEXT + "\n")
    answers = tmp_path / "answers.jsonl"
    answers.write_text(f'{{"line": 1, "token_ids": {ids(model)}}}\n{{"line": 2, "token_ids": []}}\n')
    shown = runner.invoke(app, ["decode", "--model", str(model), "--file", str(answers)])
    assert shown.stdout.splitlines() == [f'"{TEXT}"', '""']
    answers.write_text('{"text": "no ids"}\n')
    failed = runner.invoke(app, ["decode", "--model", str(model), "--file", str(answers)])
    assert failed.exit_code == 2
    assert "line 1" in failed.stderr
    assert runner.invoke(app, ["decode", "--model", str(model)]).exit_code == 2
