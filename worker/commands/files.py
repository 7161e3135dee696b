"""Files that commands leave on a worker: traces of the profiler, a journal, and copies by fsspec (s3://, gs://, …)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...messages.errors import RolloutMQError
from ...messages.model import JournalParams, StartProfileParams, StopProfileParams
from ...messages.remote import destination, without_secrets
from .parts import WorkerParts


async def start_profile(on: WorkerParts, params: StartProfileParams, deadline: float) -> Mapping[str, Any]:
    return await on.engine.operate("start_profile", params.model_dump(exclude_none=True))


async def stop_profile(on: WorkerParts, params: StopProfileParams, deadline: float) -> Mapping[str, Any]:
    if params.upload:
        await asyncio.to_thread(destination, params.upload)  # before anything is written
    result = dict(await on.engine.operate("stop_profile", {}))
    folder = Path(str(result["folder"]))
    if params.fetch_bytes:
        result["fetched"] = await asyncio.to_thread(_fetch, folder, list(result["files"]), params.fetch_bytes)
    if params.upload:
        result |= await asyncio.to_thread(upload, folder, params.upload)
    return result


async def switch_journal(on: WorkerParts, params: JournalParams, deadline: float) -> Mapping[str, Any]:
    return await (on.journal.begin(params.folder) if params.switch == "on" else on.journal.end())


def _fetch(folder: Path, names: list[str], most: int) -> dict[str, bytes]:
    """Whole files, the smallest first, as many as fit."""
    fetched: dict[str, bytes] = {}
    for file in sorted((folder / name for name in names), key=lambda each: each.stat().st_size):
        if file.stat().st_size > most:
            break
        fetched[file.name] = file.read_bytes()
        most -= len(fetched[file.name])
    return fetched


class UploadFailed(RolloutMQError):
    """The files are on the worker's disk, but some or all of them were not copied."""


def upload(path: Path, url: str) -> dict[str, Any]:
    """Copy a file, or a folder with all that is in it, into the folder at `url`, under its own name. Blocks.

    The size of every file is compared with what arrived. What the filesystem's own timeouts do not end is not ended
    here. Raises ConfigError, UploadFailed.
    """
    filesystem, root = destination(url)
    target, nbytes, count = f"{root}/{path.name}", 0, 0
    try:
        for file in _files(path):
            place = target if file == path else f"{target}/{file.relative_to(path).as_posix()}"
            filesystem.makedirs(place.rpartition("/")[0], exist_ok=True)
            filesystem.put_file(str(file), place)
            size = file.stat().st_size
            if (there := filesystem.size(place)) != size:
                raise UploadFailed(f"{file.name}: {there} of {size} bytes arrived")
            nbytes, count = nbytes + size, count + 1
    except Exception as error:  # each filesystem has errors of its own
        why = error if isinstance(error, UploadFailed) else f"{type(error).__name__}: {error}"
        raise UploadFailed(f"upload to {without_secrets(url)}: {why}. The files are still in {path}") from error
    return {"uploaded": f"{url.rstrip('/')}/{path.name}", "uploaded_files": count, "uploaded_nbytes": nbytes}


def _files(path: Path) -> Iterable[Path]:
    return [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
