"""A model that has learnt conversations by heart: what it says greedily is known, and so are its calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

LOSS, STEPS = 2e-3, 600


def learn(model: Any, said: Sequence[Sequence[tuple[list[int], bool]]]) -> None:
    """Train the model until it says its parts of conversations. said: of each (ids, whether the model says them)."""
    longest = max(sum(len(ids) for ids, _ in parts) for parts in said)
    ids, labels = torch.zeros(len(said), longest, dtype=torch.long), torch.full((len(said), longest), -100)
    for row, parts in enumerate(said):
        place = 0
        for part, own in parts:
            span = slice(place, place + len(part))
            ids[row, span] = torch.tensor(part)
            if own:
                labels[row, span] = ids[row, span]
            place = span.stop
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _step in range(STEPS):
        loss = model(ids, labels=labels).loss
        if loss.item() < LOSS:
            return
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError(f"it has not learnt in {STEPS} steps: {loss.item()}")
