"""Processors as a user would write them; the scheduler's process imports this file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rolloutmq.messages.errors import InvalidField
from rolloutmq.worker.logit_processors import LogitProcessor, Rows

OWN = {name: f"{__name__}:{name.title()}" for name in ("counter", "fresh", "broken")}


class Counter(LogitProcessor):
    """The next token is the number of tokens generated, and `offset`."""

    @classmethod
    def validate(cls, params: Mapping[str, Any], vocab_size: int) -> None:
        if not isinstance(params.get("offset"), int):
            raise InvalidField("offset", params.get("offset"), "a number")

    def __call__(self, logits: torch.Tensor, rows: Rows) -> None:
        for row, count in enumerate(rows.counts()):
            token = count + rows.params[row]["offset"]
            logits[row] = torch.full_like(logits[row], float("-inf"))
            logits[row, token] = 0.0


class Fresh(LogitProcessor):
    """No token of the prompt, and none that the sample has generated."""

    def __call__(self, logits: torch.Tensor, rows: Rows) -> None:
        for row in range(len(rows)):
            logits[row, rows.prompt_ids(row) + rows.generated_ids(row)] = float("-inf")


class Broken(LogitProcessor):
    """Fails at token `at`."""

    def __call__(self, logits: torch.Tensor, rows: Rows) -> None:
        for row, count in enumerate(rows.counts()):
            if count == rows.params[row]["at"]:
                raise RuntimeError("no idea")
