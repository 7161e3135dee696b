"""Whatever a command is given, it ends with one line that names what is wrong, and without a traceback."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from safetensors.numpy import save_file
from typer.testing import CliRunner

from rolloutmq.messages.errors import InvalidField
from rolloutmq.messages.redis import connection
from rolloutmq.messages.redis.retry import BoundedRetry
from rolloutmq.ops.cli import generate
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.files import save_model, writing
from rolloutmq.ops.operations import rq_queue

NOBODY = "redis://127.0.0.1:1/0"
COMMAND = [sys.executable, "-m", "rolloutmq.ops.entry"]
LONG = "x" * 300
LINES = {
    "not UTF-8": b'{"text": "\xff"}',
    "not JSON": b"{nope",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "a long number": b'{"text": "a", "n": ' + b"9" * 5000 + b"}",
    "half a character": b'{"text": "\\ud800"}',
    "more than 64 bits": b'{"text": "a", "min_version": ' + b"9" * 400 + b"}",
    "an id that is none": b'{"token_ids": [99999999999]}',
}
"""By what is wrong with them: lines of a file of prompts."""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder to work in: prompts.jsonl, garbage of each kind, a folder."""
    for name, line in LINES.items():
        (tmp_path / f"{name}.jsonl").write_bytes(line + b"\n")
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "folder").mkdir()
    return tmp_path


def refused(files: Path, arguments: Sequence[str], *names: str) -> str:
    """What the command says on stderr; it has to be one line, but for the usage before it, and to hold `names`."""
    os.chdir(files)
    ended = CliRunner().invoke(app, list(arguments), env={"ROLLOUTMQ_REDIS": NOBODY})
    assert isinstance(ended.exception, SystemExit), ended.exception
    assert ended.exit_code == 2
    *usage, line = ended.stderr.strip().splitlines()
    assert not usage or usage[0].startswith("Usage:")
    for name in names:
        assert name in line
    return line


@pytest.fixture(autouse=True)
def here() -> Iterator[None]:
    before = Path.cwd()
    yield
    os.chdir(before)


UNSEEN = {"half a character", "more than 64 bits", "an id that is none"}
"""The client finds these, or does not read the field."""
READERS = {
    "submit": ("submit", "--out", "o.jsonl"),
    "embed": ("embed", "--out", "o.npy"),
    "score": ("score", "--file"),
    "decode": ("decode", "--model", ".", "--file"),
}


@pytest.mark.parametrize("wrong", LINES)
@pytest.mark.parametrize("command", READERS)
def test_a_line_of_a_file(files: Path, command: str, wrong: str) -> None:
    if command in {"embed", "score"} and wrong in UNSEEN:
        refused(files, [*READERS[command], f"{wrong}.jsonl"])
    else:
        refused(files, [*READERS[command], f"{wrong}.jsonl"], "InvalidField: line 1", "=")


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("file", ["folder", "missing", LONG, "/proc/self/mem"], ids=lambda file: file[:14])
def test_a_file_that_cannot_be_read(files: Path, command: str, file: str) -> None:
    refused(files, [*READERS[command], file], file)


@pytest.mark.parametrize("arguments", ["replay books z.json", "config explain z.json", "config show --config z.json"])
def test_a_document_without_end(files: Path, arguments: str) -> None:
    (files / "z.json").symlink_to("/dev/zero")
    refused(files, arguments.split(), "must have at most")


WRITERS = {
    "submit": ("submit", "prompts.jsonl", "--out"),
    "embed": ("embed", "prompts.jsonl", "--out"),
    "demo": ("demo", "--out"),
    "tiny-model": ("tiny-model",),
    "redis": ("redis", "--directory"),
    "stop-profile": ("control", "profile", "stop", "--out"),
}
OUT = {
    "no place": "/proc/none/o",
    "below a device": "/dev/null/o",
    "below a file": "prompts.jsonl/o",
    "something else": "",
    "a long folder": f"{LONG}/o",
    "a long name": LONG,
}


@pytest.mark.parametrize("where", OUT)
@pytest.mark.parametrize("command", WRITERS)
def test_a_place_that_cannot_be_written(files: Path, command: str, where: str) -> None:
    folders = command in {"demo", "tiny-model", "redis", "stop-profile"}
    out = OUT[where] or ("prompts.jsonl" if folders else "folder")
    if command == "embed":
        out += ".npy"
        (files / "folder.npy").mkdir()
    option = WRITERS[command][-1].replace("tiny-model", "DIRECTORY")
    refused(files, [*WRITERS[command], out], f"InvalidField: {option}=", out[:40])


class Weights:
    """Saved as transformers saves a model."""

    def save_pretrained(self, folder: Path) -> None:
        save_file({"w": np.zeros(1 << 14, np.float32)}, folder / "model.safetensors")


def test_a_disk_that_is_full_when_a_model_is_written(files: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, before[1]))
    try:
        with pytest.raises(InvalidField, match=r"DIRECTORY=.*cannot be written: .*File too large"), \
                writing("DIRECTORY", files):  # fmt: skip
            save_model(Weights(), files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("generate", "--token-ids", "99999999999"), ("--token-ids='99999999999'", "below 2147483648")),
        (("generate", "--token-ids", "9" * 5000), ("--token-ids=",)),
        (("generate", "a", "--timeout", "nan"), ("--timeout",)),
        (("generate", "a", "--temperature", "nan"), ("temperature=nan",)),
        (("generate", "a", "--n", "0"), ("--n", "1")),
        (("journal", "show", ".", "--version", "-1"), ("--version", "0")),
        (("score", "a", "--prompt", "-1", "--ids"), ("--prompt='-1'",)),
        (("decode", "--model", ".", "-1"), ("-1",)),
        (("score", "--file", "prompts.jsonl", "--timeout", "inf"), ("--timeout", "inf")),
        (("submit", "prompts.jsonl", "--out", "o", "--window", "0"), ("--window",)),
        (("submit", "prompts.jsonl", "--out", "o", "--n", "0"), ("line 1.n=0",)),
        (("submit", "prompts.jsonl", "--out", "prompts.jsonl", "--overwrite"), ("--out='prompts.jsonl'", "another")),
        (("submit", "prompts.jsonl", "--out", "/dev/null", "--overwrite"), ("--out='/dev/null'", "must be a file")),
        (("status", "--redis", "redis://h?ssl_bogus=1"), ("ssl_bogus",)),
        (("status", "--redis", "redis+sentinel://[h/main"), ("redis+sentinel://[h/main",)),
        (("status", "--pool", "\udcff"), ("pool=",)),
        (("cancel", "9" * 31), ("job=",)),
        (("ops", "run", "audit-broker", "--param", f"most={'9' * 5000}"), ("most=",)),
        (("ops", "run", "audit"), ("operation='audit'",)),
        (("ops", "worker", "--log-level", "loud"), ("log_level='loud'", "debug")),
        (("control", "abort", "--timeout", "nan"), ("--timeout",)),
        (("snapshots", LONG), (LONG,)),
        (("redis", "--port", "65536"), ("--port", "65535")),
        (("demo", "--seed", "-1"), ("--seed",)),
        (("config", "explain", "folder"), ("folder",)),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value[0], str) else "",
)  # fmt: skip
def test_an_option(files: Path, arguments: Sequence[str], names: Sequence[str]) -> None:
    refused(files, arguments, *names)


CONFIGURATIONS = {
    "not UTF-8": b"\xff",
    "deep": b"[" * 100_000,
    "deep TOML": b"worker = " + b"[" * 100_000,
    "a long number": b'{"worker": {"max_running": ' + b"9" * 5000 + b"}}",
    "a long number in TOML": b"[worker]\nmax_running = " + b"9" * 5000,
    "no date": b"worker: {pool: 2026-99-99}",
    "no character": b"\0",
    "billions": b"a: &a {x: 1, y: 2}\n"
    + b"".join(b"%c: &%c {k: *%c, l: *%c}\n" % (name, name, name - 1, name - 1) for name in b"bcdefghijklmnopqrstuvw"),
}


@pytest.mark.parametrize("suffix", ["yaml", "toml", "json"])
@pytest.mark.parametrize("wrong", CONFIGURATIONS)
def test_a_configuration(files: Path, wrong: str, suffix: str) -> None:
    (files / f"c.{suffix}").write_bytes(CONFIGURATIONS[wrong])
    refused(files, ["config", "show", "--config", f"c.{suffix}"], f"c.{suffix}")


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"


@pytest.mark.parametrize(
    "arguments",
    [("status",), ("ops", "run", "audit-broker"), ("ops", "list"), ("ops", "worker", "--burst"), ("generate", "a")],
    ids=" ".join,
)
def test_a_server_that_says_nothing(silent: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ONCE_S", 0.1)
    ended = CliRunner().invoke(app, [*arguments, "--redis", silent])
    assert isinstance(ended.exception, SystemExit), ended.exception
    assert ended.exit_code == 2
    assert re.match(
        r"RedisUnavailable: .*127\.0\.0\.1:\d+.*: no (answer|reply) within 0\.1 s\. Look whether", ended.stderr
    )


@pytest.fixture
def falls_silent() -> Iterator[str]:
    """A server that answers PING, and says nothing more."""

    class Server(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while count := self.rfile.readline()[1:]:
                words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2).strip() for _ in range(int(count))]
                if words[0] in {b"PING", b"AUTH", b"CLIENT"}:
                    self.wfile.write(b"+PONG\r\n" if words[0] == b"PING" else b"+OK\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"redis://user:secret@127.0.0.1:{server.server_address[1]}/0"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("cancel", "--client", "a"),
        ("weights", "list"),
        ("dead", "list"),
        ("control", "pause"),
        ("ops", "run", "audit-broker"),
        ("ops", "run", "audit-broker", "--here"),
        ("ops", "list"),
        ("ops", "watch", "a"),
        ("generate", "a"),
    ],
    ids=" ".join,
)
def test_a_server_that_falls_silent(
    falls_silent: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BoundedRetry", partial(BoundedRetry, 0.1, 0.1))
    monkeypatch.setattr(rq_queue, "REPLY_TIMEOUT_S", 0.1)
    ended = CliRunner().invoke(app, [*arguments, "--redis", falls_silent])
    assert isinstance(ended.exception, SystemExit), ended.exception
    assert ended.exit_code == 2
    told = ended.stderr.splitlines()[-1]
    assert re.match(r"RedisUnavailable: .*127\.0\.0\.1:\d+.*: no (answer|reply) within 0\.1 s\. Look whether", told)
    assert "secret" not in told


def start(*arguments: str, **pipes: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, **pipes)


@pytest.mark.parametrize("arguments", [("--help",), ("config", "show"), ("config", "show", "--json")], ids=" ".join)
def test_nobody_reads_what_it_prints(arguments: Sequence[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*arguments, stdout=writing)
    os.close(writing)
    assert process.communicate()[1] == ""
    assert process.returncode == 1


def test_the_disk_is_full_where_it_prints() -> None:
    with open("/dev/full", "w") as full:
        process = start("config", "show", "--json", stdout=full)
        told = process.communicate()[1]
    assert told.splitlines() == ["OSError: [Errno 28] No space left on device"]
    assert process.returncode == 2


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", ">&- 2>&-"])
@pytest.mark.parametrize(
    "arguments", ["config show", "ops run audit-broker --here", "generate --session", "dead drop --all"]
)
def test_a_stream_that_was_closed_before(redis_db: str, arguments: str, closed: str) -> None:
    command = f"{' '.join(COMMAND)} {arguments} {closed}"
    ended = subprocess.run(
        command,
        check=False,
        shell=True,
        capture_output=True,
        text=True,
        env={**os.environ, "ROLLOUTMQ_REDIS": redis_db},
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_is_typed_need_not_be_text(redis_db: str, tmp_path: Path) -> None:
    (tmp_path / "typed").write_bytes(b"\xff\n")
    with (tmp_path / "typed").open() as typed:
        process = start("generate", "--session", "--timeout", "0.1", "--redis", redis_db, stdin=typed)
        assert process.communicate()[1].startswith("WaitTimeout")
    assert process.returncode == 2


@pytest.mark.parametrize("typed", ["a file", "a pipe"])
def test_a_typed_line_without_end(
    redis_db: str, typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "MAX_STR", 1000)
    command = ["generate", "--session", "--timeout", "0.1", "--redis", redis_db]
    reading, writing = os.pipe()
    os.write(writing, b"x" * 1001)
    with open("/dev/zero") as endless, open(reading) as pipe:
        monkeypatch.setattr(sys, "stdin", endless if typed == "a file" else pipe)
        assert app(command, standalone_mode=False) == 2
    os.close(writing)
    assert re.fullmatch("InvalidField: stdin=.*: a line must have at most 1,000 bytes\n", capsys.readouterr().err)


def interrupted(process: subprocess.Popen[str]) -> None:
    """Ctrl-C ends it with one line."""
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert told.splitlines() == ["interrupted"]
    assert process.returncode == 130


@pytest.mark.parametrize("arguments", [("status",), ("ops", "list")], ids=" ".join)
def test_ctrl_c_while_a_server_says_nothing(arguments: Sequence[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = start(*arguments, "--redis", f"redis://127.0.0.1:{server.getsockname()[1]}/0")
        connection = server.accept()[0]
        assert connection.recv(1)  # it has asked, and waits
        interrupted(process)
        connection.close()


def test_ctrl_c_while_nothing_is_typed(redis_db: str) -> None:
    process = start("generate", "--session", "--redis", redis_db, stdin=subprocess.PIPE)
    with redis.Redis.from_url(redis_db) as db:
        while not any(client["cmd"] == "xread" for client in db.client_list()):
            assert process.poll() is None
    interrupted(process)
