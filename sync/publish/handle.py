"""What a publication comes to: a handle at once, a report in the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ...messages.errors import WaitTimeout, WeightSyncError

if TYPE_CHECKING:
    from ..packing import PackedWeights


State = Literal["committed", "failed", "aborted", "superseded", "delegated"]


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What became of one `publish`.

    state: "committed" (at least one worker serves it, or the pool is empty and later workers will catch up to it),
        "failed" (no worker has it), "aborted" (likewise, and because of `PublishHandle.abort`), "superseded" (a newer
        version was published before this one's turn came), or "delegated" (on a rank of the trainer that only helped
        to gather: its leader has the report).
    workers: those that serve it. failures: worker id -> why it does not; "trainer" for a version that was not sent.
    seconds: from `publish` to the commit. adapter: name of the LoRA adapter it is a version of, "" for the weights.
    readback: whether every one of `workers` compared what its engine holds with what was published, not only what had
        arrived: not with `verify=False`, for adapters, or where an engine loads in a way that cannot be turned round.
    """

    version: int
    state: State
    workers: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0
    adapter: str = ""
    readback: bool = False


Phase = Literal["waiting", "digesting", "announced", "sending", "done"]


@dataclass(frozen=True, slots=True)
class PublishProgress:
    """How far a publication is.

    phase: "waiting" for its turn, "digesting" on the trainer's device, "announced" to the pool, "sending", "done".
    sent_bytes of total_bytes have been given to the transport; they begin again when a transfer is repeated without a
        worker that broke it. workers: those that take part, once that is settled; in the end those that have it.
    """

    phase: Phase
    sent_bytes: int = 0
    total_bytes: int = 0
    workers: tuple[str, ...] = ()


class PublishHandle:
    """A version on its way. All methods may be called from any thread."""

    def __init__(self, version: int, on_abort: Callable[[PublishHandle], None] = lambda handle: None) -> None:
        self.version = version
        self.aborted = ""
        """Why `abort` was called, or empty."""
        self._on_abort = on_abort
        self._look: Callable[[], PublishProgress] = lambda: PublishProgress("waiting")
        self._future: Future[PublishReport] = Future()

    def progress(self) -> PublishProgress:
        """How far it is now. Costs nothing: nobody is asked."""
        if not self.done():
            return self._look()
        try:
            report = self.wait(0)
        except WeightSyncError:
            return PublishProgress("done")
        return PublishProgress("done", report.nbytes if report.workers else 0, report.nbytes, report.workers)

    def abort(self, why: str = "aborted by the trainer") -> None:
        """Give it up. Returns at once; `wait` says what became of it: "aborted", or "committed" where it was too late
        for a worker, or an adapter. Workers that had not loaded it go on with the weights they have."""
        if not self.done():
            self.aborted = self.aborted or why
            self._on_abort(self)

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> PublishReport:
        """The report, when there is one. Raises WaitTimeout, or WeightSyncError if the publisher itself broke."""
        try:
            return self._future.result(timeout)
        except TimeoutError:
            raise WaitTimeout(f"version {self.version} is still on its way after {timeout} s") from None


@dataclass(slots=True)
class Publication:
    """A publication until its report: what is sent, and since when. config: of a LoRA adapter."""

    packed: PackedWeights
    handle: PublishHandle
    began: float
    adapter: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people."""
        version = f"version {self.packed.version}"
        return f"{version} of adapter {self.adapter}" if self.adapter else version

    def tell(self, state: State, **found: Any) -> None:
        """Give the handle its report; `found` are further fields of it."""
        seconds = time.monotonic() - self.began
        report = PublishReport(self.packed.version, state, seconds=seconds, adapter=self.adapter, **found)
        self.handle._future.set_result(report)
