"""Orders for an engine to read a version from disk."""

from __future__ import annotations

import itertools

from ...sync.transfer import TransferOrder

SLOWEST = 50e6
"""Bytes per second that a disk is given at least."""
TIMEOUT_S = 60.0
_numbers = itertools.count(-1, -1)
"""Numbers that no transfer of the ledger has. An engine tells prepared versions apart by them."""


def folder_order(path: str, version: int, nbytes: int) -> TransferOrder:
    """For an engine to load the `nbytes` bytes that a folder has, as `version`."""
    return TransferOrder.from_disk(path, version, next(_numbers), timeout_s=TIMEOUT_S + nbytes / SLOWEST)
