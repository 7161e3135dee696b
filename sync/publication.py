"""What a publication comes to: a handle at once, a report in the end."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Literal

from ..messages.errors import WaitTimeout


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What became of one `publish`.

    state: "committed" (at least one worker serves it, or the pool is empty and later workers will catch up to it),
        "failed" (no worker has it), "superseded" (a newer version was published before this one's turn came), or
        "delegated" (on a rank of the trainer that only helped to gather: its leader has the report).
    workers: those that serve it. failures: worker id -> why it does not; "trainer" for a version that was not sent.
    seconds: from `publish` to the commit. adapter: name of the LoRA adapter it is a version of, "" for the weights.
    readback: whether every one of `workers` compared what its engine holds with what was published, not only what had
        arrived: not with `verify=False`, for adapters, or where an engine loads in a way that cannot be turned round.
    """

    version: int
    state: Literal["committed", "failed", "superseded", "delegated"]
    workers: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0
    adapter: str = ""
    readback: bool = False


class PublishHandle:
    """A version on its way."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._future: Future[PublishReport] = Future()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> PublishReport:
        """The report, when there is one. Raises WaitTimeout, or WeightSyncError if the publisher itself broke."""
        try:
            return self._future.result(timeout_s)
        except FutureTimeout:
            raise WaitTimeout(f"version {self.version} is still on its way after {timeout_s} s") from None
