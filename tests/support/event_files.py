"""What is in TensorBoard's event files, as TensorBoard would read it."""

from __future__ import annotations

import struct
from collections import defaultdict
from pathlib import Path

from tensorboardX.proto import event_pb2


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Name -> (step, value), of all event files below a folder.

    A record in them: its length, a checksum of that, itself, a checksum.
    """
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            for value in event.summary.value:
                found[value.tag].append((event.step, value.simple_value))
            at += 16 + length
    return found
