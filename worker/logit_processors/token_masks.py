"""Processors that allow only some tokens, forbid some, forbid some until the sample has a length, or dictate them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ...messages.errors import InvalidField
from . import params as check
from .processor import LogitProcessor, Rows

NEVER = float("-inf")


class ActionMask(LogitProcessor):
    """Allows only `token_ids`. Every other token has probability 0."""

    @classmethod
    def validate(cls, params: Mapping[str, Any], vocab_size: int) -> None:
        check.only(params, ["token_ids"])
        check.token_ids(params, vocab_size)

    def __call__(self, logits: torch.Tensor, rows: Rows) -> None:
        logits.masked_fill_(~rows.keep_all(partial(_listed, logits, rows)), NEVER)


class DisallowedTokens(LogitProcessor):
    """Forbids `token_ids`: they have probability 0."""

    @classmethod
    def validate(cls, params: Mapping[str, Any], vocab_size: int) -> None:
        check.only(params, ["token_ids"])
        if len(check.token_ids(params, vocab_size)) == vocab_size:
            raise InvalidField("token_ids", params["token_ids"], "at least one token of the vocabulary must be left")

    def __call__(self, logits: torch.Tensor, rows: Rows) -> None:
        logits.masked_fill_(rows.keep_all(partial(_listed, logits, rows)), NEVER)


class MinNewTokens(LogitProcessor):
    """Forbids `token_ids` until the sample has generated `min_new_tokens` tokens."""

    @classmethod
    def validate(cls, params: Mapping[str, Any], vocab_size: int) -> None:
        check.only(params, ["min_new_tokens", "token_ids"])
        check.count(params, "min_new_tokens")
        if len(check.token_ids(params, vocab_size)) == vocab_size:
            raise InvalidField("token_ids", params["token_ids"], "at least one token of the vocabulary must be left")

    def __call__(self, logits: torch.Tensor, rows: Rows) -> None:
        listed, least = rows.keep_all(lambda: (_listed(logits, rows), _least(rows)))
        logits.masked_fill_(listed & (rows.generated < least)[:, None], NEVER)


class ForcedTokens(LogitProcessor):
    """Dictates the sample's first tokens: they are `token_ids`, in order. Those that follow are free."""

    @classmethod
    def validate(cls, params: Mapping[str, Any], vocab_size: int) -> None:
        check.only(params, ["token_ids"])
        check.token_ids(params, vocab_size)

    def __call__(self, logits: torch.Tensor, rows: Rows) -> None:
        ids, counts = rows.keep_all(partial(_dictated, rows))
        token = ids.gather(1, rows.generated.clamp(max=ids.shape[1] - 1)[:, None])
        kept = logits.gather(1, token)
        logits.masked_fill_((rows.generated < counts)[:, None], NEVER).scatter_(1, token, kept)


def _dictated(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows, most) and (rows,) int64: the tokens of each row, filled up with zeros, and how many there are."""
    lists = [params["token_ids"] for params in rows.params]
    most = max(map(len, lists))
    return rows.tensor([[*ids, *[0] * (most - len(ids))] for ids in lists]), rows.tensor([len(ids) for ids in lists])


def _listed(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return (rows, vocabulary) bool: the tokens in each row's `token_ids`."""

    def one(row: int) -> torch.Tensor:
        mask = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        return mask.index_fill_(0, rows.tensor(list(rows.params[row]["token_ids"]), torch.int64), True)

    return torch.stack([rows.keep(row, partial(one, row)) for row in range(len(rows))])


def _least(rows: Rows) -> torch.Tensor:
    return rows.tensor([params["min_new_tokens"] for params in rows.params])
