"""The kinds of replay, by the names that the command has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .recorded import Recorded
from .settings import Settings
from .tokens import replay_tokens
from .verdict import Verdict

Depth = Callable[[Iterable[Recorded], Settings], list[Verdict]]
"""Takes samples, and gives the verdict on each, in their order. It blocks until all are there."""

DEPTHS: Mapping[str, Depth] = {"tokens": replay_tokens}
"""Name of a depth -> its function. A new depth is a line here; what it needs beside samples stands in `Settings`."""
