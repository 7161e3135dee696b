"""rolloutmq's own loader, with a hand that changes a weight behind its back. Runs inside an engine."""

from __future__ import annotations

import json
from typing import Any

from rolloutmq.sync.receive.loading import Loading
from rolloutmq.worker.sglang.inside.control import commit

TAMPERED = 666
"""A load of this version ends with one bit of lm_head.weight flipped, before it is read back."""


def receive(model: Any, named_tensors: Any) -> None:
    """SGLang's hook."""
    import torch  # noqa: PLC0415

    named = list(named_tensors)
    assert [tensor.numel() for _, tensor in named] == [1]
    if int(json.loads(named[0][0])["version"]) != TAMPERED:
        commit(model, named)
        return
    original, head = Loading.queue_readback, dict(model.named_parameters())["lm_head.weight"]

    def tampered(self: Loading, bucket: int) -> None:
        if bucket == len(self._by_bucket) - 1:  # everything is loaded
            head.data.view(-1).view(torch.uint8)[1000] ^= 4
            for each in range(bucket + 1):
                original(self, each)

    Loading.queue_readback = tampered  # type: ignore[method-assign]
    try:
        commit(model, named)
    finally:
        Loading.queue_readback = original  # type: ignore[method-assign]
