"""Copies of versions in other places: another folder of versions, or any place that fsspec reaches. Needs no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ...messages.errors import ConfigError
from ...messages.remote import destination
from .errors import SnapshotConflict, SnapshotError, disk_errors
from .folder import INDEX, VersionFolder, folder_name
from .index import WEIGHT_MAP
from .read import DiskVersion

CHUNK = 8 << 20


def export_version(version: DiskVersion, destination: str, check: Callable[[], None] = lambda: None) -> bool:
    """Copy an opened version into a folder of versions: an absolute path, or a URL such as s3://bucket/weights.

    Returns False, without copying, if the same version is there. Every file of the copy is read back and compared with
    what was read here. The index comes last, so a copy that was broken off is no version; in a folder on disk it has no
    name either (see folder.py). This proves a faithful copy; `DiskVersion.verify` proves the contents. Blocks.

    Raises SnapshotConflict if the version is there with other contents, SnapshotError, and ConfigError for a URL that
    cannot be opened. check: is called now and then; what it raises ends the copy.
    """
    names = [*(entry.name for entry in version.index.files), *(beside.name for beside in version.index.beside)]
    if "://" in destination:
        return _to_url(version, [*names, WEIGHT_MAP], destination, check)
    return _to_folder(version, [*names, WEIGHT_MAP], VersionFolder(Path(destination)), check)


def _to_folder(version: DiskVersion, names: list[str], folder: VersionFolder, check: Callable[[], None]) -> bool:
    target = folder.path / folder_name(version.version)
    content = _content(version)
    with disk_errors("exporting to", target):
        if target.exists():
            return _same(content, (target / INDEX).read_bytes(), str(target))
        with folder.draft(version.version) as draft:
            for name in names:
                with _source(version, name) as source, (draft.path / name).open("xb") as file:
                    digest = _copied(source, file.write, check)
                    file.flush()
                    os.fsync(file.fileno())
                with (draft.path / name).open("rb") as written:
                    _check(digest, written, str(draft.path / name))
            draft.write_index(content)
            return draft.publish() or _same(content, (target / INDEX).read_bytes(), str(target))


def _to_url(version: DiskVersion, names: list[str], url: str, check: Callable[[], None]) -> bool:
    filesystem, root = destination(url)
    target = f"{root}/{folder_name(version.version)}"
    content = _content(version)
    try:
        if filesystem.exists(f"{target}/{INDEX}"):
            return _same(content, filesystem.cat_file(f"{target}/{INDEX}"), target)
        filesystem.makedirs(target, exist_ok=True)
        for name in names:
            with _source(version, name) as source, filesystem.open(f"{target}/{name}", "wb") as file:
                digest = _copied(source, file.write, check)
            with filesystem.open(f"{target}/{name}", "rb") as written:
                _check(digest, written, name)
        filesystem.pipe_file(f"{target}/{INDEX}", content)
        _same(content, filesystem.cat_file(f"{target}/{INDEX}"), target)
        return True
    except (SnapshotError, ConfigError):
        raise
    except Exception as error:  # each filesystem has errors of its own
        raise SnapshotError(f"exporting {version.path.name}: {type(error).__name__}: {error}") from error


def _content(version: DiskVersion) -> bytes:
    with _source(version, INDEX) as index:
        return index.read()


def _same(mine: bytes, found: bytes, where: str) -> bool:
    """False: there is nothing to copy. Raises SnapshotConflict."""
    if mine != found:
        raise SnapshotConflict(f"{where} is there with other contents, and is not replaced")
    return False


def _source(version: DiskVersion, name: str) -> IO[bytes]:
    return open(version.path / name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW))


def _copied(source: IO[bytes], write: Callable[[bytes], Any], check: Callable[[], None]) -> str:
    """Copy; returns the SHA-256 of what was read."""
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        check()
        digest.update(chunk)
        write(chunk)
    return digest.hexdigest()


def _check(expected: str, written: IO[bytes], where: str) -> None:
    if hashlib.file_digest(written, "sha256").hexdigest() != expected:  # type: ignore[arg-type]  # IO[bytes] will do
        raise SnapshotError(f"{where} does not have what was written to it")
