"""One engine rank's connection to the sender: it joins there, asks for sources, and is known to be alive by it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from ...messages.errors import MalformedMessage, TransferTimeout
from ..transfer import SENDER_GONE
from .frames import ANSWER, ASK, MOST_ANSWERED, WAIT, Map, call

ANSWER_S = 3.0
"""A sender that is silent for so many seconds counts as gone: the thread that answers does nothing else."""
LOOK_S = 0.1


class SenderLine:
    """Stays open from one transfer to the next. One thread asks; another one answers the sender's WAITs.

    lost: why it is of no more use; "" if it is.
    """

    def __init__(self, address: str) -> None:
        """Raises TransferTimeout if nobody answers there."""
        self.address, self.lost = address, ""
        self._talk = call(address)
        self._answers: SimpleQueue[Map | str] = SimpleQueue()
        threading.Thread(target=self._hear, name="rolloutmq-line", daemon=True).start()

    def ask(self, do: str, deadline: float, broken: Callable[[], str], **told: Any) -> Map:
        """Ask, and return the answer. Raises TransferTimeout for a refusal, a sender that is gone, or at `deadline`."""
        asked = time.monotonic()
        self.tell(do, **told)
        while True:
            try:
                answer = self._answers.get(timeout=LOOK_S)
            except Empty:
                why, now = self.lost or broken(), time.monotonic()
                if not why and now < min(deadline, asked + ANSWER_S):
                    continue
                if not why:
                    why = f"{SENDER_GONE}: no answer within {now - asked:.1f} s"
                    self.close()
                raise TransferTimeout(why) from None
            if isinstance(answer, str):
                raise TransferTimeout(answer)
            return answer

    def tell(self, do: str, **told: Any) -> None:
        """Say something that has no answer. Raises TransferTimeout if the sender is gone."""
        try:
            self._talk.say(ASK, {"do": do, **told})
        except OSError as error:
            self.lost = self.lost or f"{SENDER_GONE}: {error}"
            raise TransferTimeout(self.lost) from None

    def close(self) -> None:
        """Leave the sender."""
        self.lost = self.lost or "this engine has left the sender"
        self._talk.close()

    def _hear(self) -> None:
        try:
            while True:
                kind, told = self._talk.hear(MOST_ANSWERED)
                if kind == WAIT:
                    self._talk.say(WAIT)
                elif kind == ANSWER or isinstance(told, str):
                    self._answers.put(told)
        except (OSError, MalformedMessage) as error:
            self.lost = self.lost or f"{SENDER_GONE}: {error}"
            self._answers.put(self.lost)
        with contextlib.suppress(OSError):
            self._talk.close()
