"""Findings about this host: Python, limits, shared memory, disks, and the ports of weight sync."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...messages.errors import InvalidField
from ...messages.redis import parse_shards
from .finding import Finding, Level

FILES_FEW, FILES_ENOUGH = 1024, 4096
SHM = Path("/dev/shm")
SHM_LEAST = 1 << 30
DISK_LEAST, DISK_LOW = 1 << 30, 20 << 30
REACH_S = 3.0


def host_findings(
    redis_url: str, folders: Sequence[Path], reach: Sequence[str], *, worker_host: bool, has_gpu: bool
) -> list[Finding]:
    """Raises InvalidField for an address in `reach` that is none."""
    addresses = [_address(text) for text in reach]
    return [
        _python(),
        _open_files(),
        *_locked_memory(),
        *([_shared_memory(has_gpu)] if worker_host else []),
        *_disks(folders, worker_host=worker_host),
        _listens(redis_url),
        *(_reaches(host, port) for host, port in addresses),
    ]


def _python() -> Finding:
    return Finding("python", "ok", f"{sys.version.split()[0]} ({sys.executable})")


def _open_files() -> Finding:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= FILES_ENOUGH:
        return Finding(
            "open files", "ok", "no limit" if most == resource.RLIM_INFINITY else f"{most} at most (ulimit -n)"
        )
    level: Level = "problem" if most < FILES_FEW else "warning"
    return Finding(
        "open files", level, f"{most} at most (ulimit -n)", f"Raise it to {FILES_ENOUGH} or more: `ulimit -n`."
    )


def _locked_memory() -> list[Finding]:
    """Only InfiniBand needs memory that is locked."""
    if not Path("/dev/infiniband").is_dir():
        return []
    most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if most == resource.RLIM_INFINITY:
        return [Finding("locked memory", "ok", "no limit")]
    advice = "Set `ulimit -l unlimited` (Docker: --ulimit memlock=-1): NCCL locks memory for InfiniBand."
    return [Finding("locked memory", "warning", f"{most >> 20} MiB at most (ulimit -l)", advice)]


def _shared_memory(has_gpu: bool) -> Finding:
    try:
        total, _, free = shutil.disk_usage(SHM)
    except OSError as error:
        return Finding(
            "shared memory", "problem", f"{SHM}: {error.strerror}", "Mount a tmpfs there: NCCL and SGLang need it."
        )
    found = f"{free >> 20} of {total >> 20} MiB free in {SHM}"
    if free < SHM_LEAST:
        advice = (
            "Give the container more (--shm-size=8g, or an emptyDir with medium Memory): NCCL and SGLang fail without."
        )
        return Finding("shared memory", "problem" if has_gpu else "warning", found, advice)
    return Finding("shared memory", "ok", found)


def _disks(folders: Sequence[Path], *, worker_host: bool) -> list[Finding]:
    """Of temporary files, of models from the hub where there is an engine, and of the folders that were named."""
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    looked = {"temporary files": Path(tempfile.gettempdir())} | ({"models": cache} if worker_host else {})
    findings = [_disk(name, path, DISK_LOW if name == "models" else DISK_LEAST) for name, path in looked.items()]
    return findings + [_disk("folder", folder, DISK_LOW) for folder in folders]


def _disk(name: str, path: Path, low: int) -> Finding:
    try:
        there = next((it for it in (path.absolute(), *path.absolute().parents) if it.exists()), Path("/"))
        free = shutil.disk_usage(there).free
    except OSError as error:
        advice = "Let this user look into it, or use another folder."
        return Finding(name, "problem", f"{path}: {error.strerror}", advice)
    found = f"{free / (1 << 30):.1f} GiB free for {path}"
    if free < DISK_LEAST:
        return Finding(name, "problem", found, "Make room, or use a folder on another disk.")
    if free < low:
        return Finding(name, "warning", found, "Make room: a model or a snapshot of one may not fit.")
    if not os.access(there, os.W_OK):
        return Finding(
            name, "problem", f"{path}: this user may not write there", "Change its owner, or use another folder."
        )
    return Finding(name, "ok", found)


def _listens(redis_url: str) -> Finding:
    """Whether a trainer here could offer weights: its rendezvous store listens on the address of the route to Redis."""
    target = parse_shards(redis_url).targets[0]
    address = _own_address(*target.nodes[0]) if target.nodes else "127.0.0.1"
    try:
        with contextlib.closing(socket.create_server((address, 0), family=_family(address))) as server:
            port = server.getsockname()[1]
            socket.create_connection((address, port), REACH_S).close()
    except OSError as error:
        advice = "Give the publisher an address that workers reach (SyncSettings.host), and open its port."
        return Finding("rendezvous", "problem", f"{address}: a port cannot be opened and reached: {error}", advice)
    if address in {"127.0.0.1", "::1"}:
        advice = "For workers on other hosts, name Redis by an address, or set SyncSettings.host."
        return Finding("rendezvous", "ok", f"a trainer here would listen on {address}, for this host alone", advice)
    return Finding(
        "rendezvous", "ok", f"a trainer here would listen on {address}, on a free port (SyncSettings.port: a fixed one)"
    )


def _own_address(host: str, port: int) -> str:
    """This host's address on the way to another one. Nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # the second one is of a name that cannot be one
        return "127.0.0.1"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidField("reach", text, "an address such as trainer-0:29500")
    return host.strip("[]"), int(port)


def _reaches(host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), REACH_S).close()
    except (OSError, UnicodeError) as error:
        advice = "Look whether the trainer runs, and whether a firewall or network policy is in between."
        return Finding("reach", "problem", f"{host}:{port} cannot be reached: {error}", advice)
    return Finding("reach", "ok", f"{host}:{port} takes connections")
