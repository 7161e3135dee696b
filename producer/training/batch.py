"""Rows as torch tensors: padded, packed, or nested. This module imports torch; import it only where torch is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from ...messages.arguments import whole_number
from ...messages.errors import InvalidField
from ..calls import GIVEN
from .rows import Row, rows_given

Layout = Literal["padded", "packed", "nested"]


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """b rows as tensors. `of` makes them.

    What belongs to tokens is (b, t) if padded, (N,) for N tokens of all rows if packed, and nested (b, each row's
    length; torch's jagged layout) if nested: ids int64; mask int64, 1 for generated tokens; logprobs float32; versions
    int64; turns int64; positions int64, from 0 in each row. What they mean is in Row. Padding has id `pad_id`, mask 0,
    log-probability 0, version and turn -1, position 0. Everything about a token is at the token's own place: a model's
    logits of place i - 1 are about it.

    rewards: (b,) float32. groups, prompts, lengths: (b,) int64, the latter two in tokens.
    attention: (b, t) int64, 1 for tokens that are not padding; None unless padded.
    cu_seqlens: (b + 1,) int32, where each row begins and the last one ends; None unless packed.
    """

    layout: Layout
    ids: torch.Tensor
    mask: torch.Tensor
    logprobs: torch.Tensor
    versions: torch.Tensor
    turns: torch.Tensor
    positions: torch.Tensor
    rewards: torch.Tensor
    groups: torch.Tensor
    prompts: torch.Tensor
    lengths: torch.Tensor
    attention: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        rows: Iterable[Row],
        layout: Layout = "padded",
        *,
        pad_id: int = 0,
        side: Literal["right", "left"] = "right",
        multiple_of: int = 1,
    ) -> RolloutBatch:
        """The rows as a batch.

        pad_id, side, multiple_of: of padded batches: the padding's token id, where it is, and what t is a multiple of.
        Raises InvalidField.
        """
        if layout not in get_args(Layout):
            raise InvalidField("layout", layout, '"padded", "packed" or "nested"')
        if side not in ("right", "left"):
            raise InvalidField("side", side, '"right" or "left"')
        multiple_of, pad_id = whole_number("multiple_of", multiple_of, 1), whole_number("pad_id", pad_id)
        if not (rows := rows_given(rows)):
            raise InvalidField("rows", rows, "at least one")
        lengths = [len(row) for row in rows]
        width = -(-max(lengths) // multiple_of) * multiple_of

        def joined(column: Callable[[Row], npt.NDArray[Any]], dtype: Any, fill: float) -> torch.Tensor:
            parts = [torch.from_numpy(np.ascontiguousarray(column(row), dtype)) for row in rows]
            if layout == "packed":
                return torch.cat(parts)
            if layout == "nested":
                return torch.nested.nested_tensor(parts, layout=torch.jagged)
            places = [(width - len(it), 0) if side == "left" else (0, width - len(it)) for it in parts]
            padded = [torch.nn.functional.pad(it, at, value=fill) for it, at in zip(parts, places, strict=True)]
            return torch.stack(padded)

        return cls(
            layout=layout,
            ids=joined(lambda row: row.ids, np.int64, pad_id),
            mask=joined(lambda row: row.mask, np.int64, 0),
            logprobs=joined(lambda row: row.logprobs, np.float32, 0.0),
            versions=joined(lambda row: row.versions, np.int64, GIVEN),
            turns=joined(lambda row: row.turns, np.int64, GIVEN),
            positions=joined(lambda row: np.arange(len(row)), np.int64, 0),
            rewards=torch.tensor([row.reward for row in rows], dtype=torch.float32),
            groups=torch.tensor([row.group for row in rows]),
            prompts=torch.tensor([row.prompt for row in rows]),
            lengths=torch.tensor(lengths),
            attention=joined(lambda row: np.ones(len(row)), np.int64, 0) if layout == "padded" else None,
            cu_seqlens=(
                torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32) if layout == "packed" else None
            ),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, device: Any) -> RolloutBatch:
        """The same batch on another device."""
        moved = {
            one.name: value.to(device)
            for one in fields(self)
            if isinstance(value := getattr(self, one.name), torch.Tensor)
        }
        return replace(self, **moved)

    def token_rows(self) -> torch.Tensor:
        """For each token of a packed batch the number of its row, (N,) int64. Raises InvalidField for other layouts."""
        if self.layout != "packed":
            raise InvalidField("layout", self.layout, '"packed"')
        return torch.repeat_interleave(torch.arange(len(self), device=self.lengths.device), self.lengths)
