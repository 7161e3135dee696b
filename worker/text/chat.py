"""The next turns of a conversation whose tokens so far are given: rendered, and nothing of it encoded again."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.errors import RequestRefused
from .tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]


def after_context(
    tokenizer: Tokenizer,
    context: Ids,
    *,
    text: str | None = None,
    messages: list[dict[str, Any]] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> Ids:
    """(n,) ids: `context`, then the text, or the messages up to where an answer begins. Raises RequestRefused."""
    if text is not None:
        return np.concatenate([context, tokenizer.encode(text, special=False)])
    assert messages is not None
    before, opening = _short_conversation(tokenizer, "a", tools)
    other, _ = _short_conversation(tokenizer, "b", tools)
    # What the template puts behind an assistant's text; the context may have some of it: the stop, if it was kept.
    closing = before[len(before) - _common(before[::-1], other[::-1]) :]
    has = next((n for n in range(len(closing), 0, -1) if np.array_equal(context[-n:], closing[:n])), 0)
    after = tokenizer.encode_chat([*opening, *messages], tools=tools)
    if not np.array_equal(after[: len(before)], before):
        raise RequestRefused(
            "messages behind context_ids: this model's chat template does not render turns one after the other; "
            "send token_ids"
        )
    prompt: Ids = np.concatenate([context, closing[has:], after[len(before) :]]).astype(np.int32)
    return prompt


def _short_conversation(
    tokenizer: Tokenizer, answer: str, tools: list[dict[str, Any]] | None
) -> tuple[Ids, list[dict[str, Any]]]:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    return tokenizer.encode_chat(messages, tools=tools, answer=False), messages


def _common(one: Ids, other: Ids) -> int:
    """How many ids they begin with that are the same."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n
