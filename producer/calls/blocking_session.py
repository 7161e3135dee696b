"""A session for plain loops: Session on the event loop of a BlockingRolloutClient, every call waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from ...messages.model import RolloutResult
from .delta import Delta
from .prompts import Prompt
from .session import Session

T = TypeVar("T")


class Run(Protocol):
    """Waits for a coroutine on the client's loop."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


Iterate = Callable[[AsyncIterator[Delta]], Iterator[Delta]]


class BlockingSession:
    """Made by `BlockingRolloutClient.session`; method by method what Session is."""

    def __init__(self, session: Session, run: Run, iterate: Iterate) -> None:
        self._session, self._run, self._iterate = session, run, iterate

    def __len__(self) -> int:
        return len(self._session)

    @property
    def session_id(self) -> str:
        """Its name in results."""
        return self._session.session_id

    @property
    def worker(self) -> str | None:
        """See Session.worker."""
        return self._session.worker

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """See Session.token_ids."""
        return self._session.token_ids

    @property
    def mask(self) -> npt.NDArray[np.uint8]:
        """See Session.mask."""
        return self._session.mask

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """See Session.logprobs."""
        return self._session.logprobs

    @property
    def versions(self) -> npt.NDArray[np.int64]:
        """See Session.versions."""
        return self._session.versions

    def generate(self, prompt: Prompt | None = None, *, timeout: float | None = None, **fields: Any) -> RolloutResult:
        """See Session.generate."""
        return self._run(self._session.generate(prompt, timeout=timeout, **fields))

    def stream(self, prompt: Prompt | None = None, *, timeout: float | None = None, **fields: Any) -> Iterator[Delta]:
        """See Session.stream."""
        return self._iterate(self._session.stream(prompt, timeout=timeout, **fields))

    def give(self, token_ids: Sequence[int] | npt.NDArray[Any]) -> None:
        """See Session.give."""
        self._session.give(token_ids)

    def replace(self, start: int, token_ids: Sequence[int] | npt.NDArray[Any] = ()) -> None:
        """See Session.replace."""
        self._session.replace(start, token_ids)

    def branch(self, at: int | None = None) -> BlockingSession:
        """See Session.branch."""
        return BlockingSession(self._session.branch(at), self._run, self._iterate)

    def close(self) -> None:
        """See Session.close."""
        self._run(self._session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
