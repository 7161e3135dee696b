"""Takes a version bucket by bucket: each is verified as it comes, and offered to others from then on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import torch

from ...messages.model import WeightManifest
from ..transfer import TransferOrder
from ..wire import Lines, Map, Offer, Pull
from .verify import Arrival

Ask = Callable[[AbstractSet[str]], str]
"""ask(avoid): returns the address of a source that is not among `avoid`, if there is another one."""


def asks(lines: Lines, order: TransferOrder, answer: Map | None, deadline: float) -> Ask:
    """Return who is asked for sources: the sender, whose `answer` has the first one, or the order's holders in turn."""
    if answer is None:
        turns = itertools.cycle(order.holders)
        return lambda avoid: next((one for one in order.holders if one not in avoid), next(turns))
    first = [str(answer.get("source", "")) or order.address]
    who = str(answer["who"])
    return lambda avoid: first.pop() if first else lines.source(order, who, deadline, avoid)


def take(
    lines: Lines,
    order: TransferOrder,
    manifest: Callable[[], WeightManifest],
    arrival: Arrival,
    digests: torch.Tensor,
    *,
    ask: Ask,
    deadline: float,
    here: set[int],
    config: str = "",
) -> None:
    """Fill the buckets of `arrival`, which are in host memory. Blocks. Raises what `Pull.run` raises.

    digests: (tensors,) int64 on the CPU, the version's. here: the buckets that are there
    and verified. It is kept up to date. config: of a LoRA adapter.
    """
    buckets, finite = arrival.buckets, order.nonfinite == "refuse"
    offer = Offer(order.token, manifest, len(buckets), buckets.__getitem__, config)

    def arrived(index: int) -> None:
        if order.verify:
            arrival.queue(index)
            arrival.check_bucket(index, digests, finite=finite)
            here.add(index)
        offer.arrived(index)

    for index in sorted(here):
        offer.arrived(index)
    lines.put(offer, order)
    missing = [index for index in range(len(buckets)) if index not in here]
    Pull(order.token, ask, arrived, lines.broken(order)).run(buckets, missing, deadline)
