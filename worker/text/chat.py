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
    # Two conversations that differ in an answer alone: what they begin and end with is around the answer.
    head, closing = _around_an_answer(tokenizer, [], tools)
    new_head, behind = _around_an_answer(tokenizer, messages, tools)
    # A template may show the last answer with more in front of it, as Qwen3's does with an empty thought.
    if not np.array_equal(head[: len(new_head)], new_head) or not np.array_equal(behind[: len(closing)], closing):
        raise RequestRefused(
            "messages behind context_ids: this model's chat template does not render turns one after the other; "
            "send token_ids"
        )
    # The context may have some of what the template puts behind an answer: the stop, if it was kept.
    has = next((n for n in range(len(closing), 0, -1) if np.array_equal(context[-n:], closing[:n])), 0)
    prompt: Ids = np.concatenate([context, behind[has:]]).astype(np.int32)
    return prompt


def _around_an_answer(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[Ids, Ids]:
    """What the template puts in front of an answer, and from its end on, if `messages` follow it."""
    one, other = (
        tokenizer.encode_chat(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}, *messages],
            tools=tools,
            answer=bool(messages),
        )
        for answer in "ab"
    )
    return one[: _common(one, other)], one[len(one) - _common(one[::-1], other[::-1]) :]


def _common(one: Ids, other: Ids) -> int:
    """How many ids they begin with that are the same."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n
