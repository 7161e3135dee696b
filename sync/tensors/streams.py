"""Work on a GPU beside what runs there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """What is queued inside goes to a new stream of `device`: it waits for nothing, and nothing waits for it.

    Whatever has to be ordered is ordered by events. Off CUDA nothing is changed.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
