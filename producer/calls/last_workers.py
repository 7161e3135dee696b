"""Which worker answered last: it has the beginning of the conversation in its cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

REMEMBERED = 1 << 16


class LastWorkers(OrderedDict[Hashable, str]):
    """Conversation -> id of the worker that answered last for it. Keeps the 65,536 that were noted last."""

    def note(self, conversation: Hashable, worker: str) -> None:
        """Note who answered."""
        self[conversation] = worker
        self.move_to_end(conversation)
        if len(self) > REMEMBERED:
            self.popitem(last=False)
