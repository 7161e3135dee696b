"""Versions on disk, without a pool: `rolloutmq snapshots`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..messages.errors import ConfigError, WeightSyncError
from ..sync.disk import NoSuchSnapshot, SnapshotStore
from .terminal import ProgressLine


def store_in(folder: Path | str, keep: int = 1) -> SnapshotStore:
    """Raises ConfigError if there is no such folder: a mistyped one would look empty."""
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder} is not a folder")
    return SnapshotStore(folder, keep)


def snapshots(folder: Path, *, verify: bool) -> list[dict[str, Any]]:
    """Every version in a folder, oldest first. Opening one compares sizes and headers; `verify` reads every byte.

    problem: why it cannot be used, "" for none. verified: whether every byte was compared.
    """
    versions = store_in(folder)
    pinned, numbers, found = versions.pinned(), versions.versions(), []
    with ProgressLine() as line:
        for done, number in enumerate(numbers, 1):
            one = _look(versions, number, number in pinned, verify)
            found += [one] if one else []
            if verify:
                broken = sum(bool(it["problem"]) for it in found)
                line.show(done, len(numbers), f"version {number}" + (f", {broken} broken" if broken else ""))
    return found


def _look(versions: SnapshotStore, number: int, pinned: bool, verify: bool) -> dict[str, Any] | None:
    seen: dict[str, Any] = {"version": number, "path": "", "pinned": pinned, "created": "", "tensors": 0, "nbytes": 0}
    seen |= {"verified": False, "problem": ""}
    try:
        with versions.load(number) as version:
            seen |= {"path": str(version.path), "created": version.index.created, "nbytes": version.nbytes}
            seen |= {"tensors": len(version.manifest.tensors)}
            if verify:
                version.verify()
                seen["verified"] = True
    except NoSuchSnapshot:
        return None  # removed meanwhile
    except ModuleNotFoundError as error:
        raise ConfigError(f"--verify needs torch: {error}") from None
    except WeightSyncError as error:
        seen["problem"] = f"{type(error).__name__}: {error}"
    return seen


def lines(found: list[dict[str, Any]]) -> Iterator[str]:
    """The versions as lines for people."""
    for one in found:
        notes = [name for name in ("pinned", "verified") if one[name]]
        notes += [one["problem"]] if one["problem"] else []
        yield "  ".join(["version {version}  {tensors:,} tensors  {nbytes:,} bytes  {created}".format_map(one), *notes])
    if not found:
        yield "no versions"
