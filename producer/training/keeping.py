"""What was taken from the reply stream stays there until a checkpoint that knows what became of it is saved.

Then a trainer that is restored from that checkpoint gets back everything that the checkpoint does not know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...messages.arguments import whole_number
from ...messages.broker import Reply
from ...messages.errors import InvalidField


def checkpoint_number(state: Mapping[str, Any], client_id: str) -> int:
    """The number of the checkpoint that a feed's state was made for. Raises InvalidField for another client's state."""
    if not {"books", "checkpoint"} <= state.keys():
        raise InvalidField("state", state, "what RolloutFeed.state_dict made")
    if (made_by := state.get("client_id", client_id)) != client_id:  # older states have none
        allowed = f"{client_id!r}, as this client: open it under the id of the one that made the checkpoint"
        raise InvalidField("state.client_id", made_by, allowed)
    return whole_number("state.checkpoint", state["checkpoint"], 1)


class Keeping:
    """Outcomes that were taken from the stream and are not acknowledged.

    Before the first checkpoint is made there is none to go back to: what has a fate is acknowledged at once.
    """

    def __init__(self, ack: Callable[[list[Reply]], None]) -> None:
        self._ack = ack
        self._taken: dict[int, list[tuple[int, Reply]]] = {}  # by prompt: sample or FAILURE
        self._unsaved: list[Reply] = []  # with a fate that no checkpoint has
        self._saving: deque[tuple[int, list[Reply]]] = deque()
        self._checkpoints = 0
        self.nbytes = 0
        """Bytes of results with a fate that wait for a checkpoint to be saved."""

    def take(self, number: int, sample: int, reply: Reply) -> None:
        """An outcome of a prompt was taken from the stream."""
        self._taken.setdefault(number, []).append((sample, reply))

    def of(self, number: int) -> list[Reply]:
        """What was taken of a prompt and has no fate."""
        return [reply for _, reply in self._taken.get(number, [])]

    def settle(self, number: int, samples: Iterable[int], over: bool) -> None:
        """These samples have their fate. over: so have all of the prompt's, and nothing of it is needed any more."""
        ended = set(samples)
        taken = self._taken.pop(number, [])
        left = [] if over else [one for one in taken if one[0] not in ended]
        if left:
            self._taken[number] = left
        self.unneeded([reply for sample, reply in taken if over or sample in ended])

    def unneeded(self, replies: list[Reply]) -> None:
        """Nobody waits for these. The next checkpoint knows why."""
        if not self._checkpoints:
            self._ack(replies)
            return
        self._unsaved += replies
        self.nbytes += sum(reply.nbytes for reply in replies)

    def checkpoint(self, restored: int | None = None) -> int:
        """A checkpoint is being made, or was restored; returns its number."""
        self._checkpoints = self._checkpoints + 1 if restored is None else restored
        self._saving.append((self._checkpoints, self._unsaved))
        self._unsaved = []
        return self._checkpoints

    def saved(self, number: int | None) -> None:
        """The checkpoint of this number is saved, so those before it are no longer needed; None is the newest.

        Raises InvalidField for one that was not made yet.
        """
        if number is not None and number > self._checkpoints:
            raise InvalidField("state.checkpoint", number, f"at most {self._checkpoints}, the newest one")
        while self._saving and (number is None or self._saving[0][0] <= number):
            _, replies = self._saving.popleft()
            self.nbytes -= sum(reply.nbytes for reply in replies)
            self._ack(replies)
