"""What `publish` returns: a handle at once, and in the end a report."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ...messages.errors import InvalidField, WaitTimeout, WeightSyncError

if TYPE_CHECKING:
    from ..packing import PackedWeights


State = Literal["committed", "failed", "aborted", "superseded", "delegated"]


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What became of one `publish`.

    state: "committed": at least one worker serves it, or the pool is empty and later workers will catch up to it.
        "failed": no worker has it. "aborted": no worker has it, because of `PublishHandle.abort`. "superseded": a newer
        version was published before this one's turn came, or before any worker had begun to take it. "delegated": this
        rank of the trainer only helped to gather, and the leader has the report.
    workers: ids of those that serve it. failures: worker id -> why it does not; "trainer" if the version was not sent.
    seconds: from `publish` to the commit. adapter: name of the LoRA adapter, "" for the weights.
    readback: whether every one of `workers` compared its engine's parameters with what was published, and not only the
        bytes that arrived. False with `verify=False`, for adapters, and for an engine whose loader does more than
        copying.
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
    sent_bytes, total_bytes: given to the transport so far, and in all. sent_bytes starts again at 0 when a transfer is
        repeated without a worker that broke it.
    workers: ids of those that take part, once that is known. In the end, of those that have the version.
    """

    phase: Phase
    sent_bytes: int = 0
    total_bytes: int = 0
    workers: tuple[str, ...] = ()


class PublishHandle:
    """A version on its way to the workers. Any thread may call its methods."""

    def __init__(self, version: int, on_abort: Callable[[PublishHandle], None] = lambda handle: None) -> None:
        self.version = version
        self.aborted = ""
        """Why `abort` was called; "" if it was not."""
        self.awaited = False
        """Whether somebody has waited for it."""
        self._on_abort = on_abort
        self._look: Callable[[], PublishProgress] = lambda: PublishProgress("waiting")
        self._hasten: Callable[[], None] = lambda: None
        self._future: Future[PublishReport] = Future()
        self._first: Future[PublishReport] = Future()
        self._future.add_done_callback(self._end)

    def progress(self) -> PublishProgress:
        """Return how far it is now. It sends nothing and does not wait."""
        if not self.done():
            return self._look()
        try:
            report = self.wait(0)
        except WeightSyncError:
            return PublishProgress("done")
        return PublishProgress("done", report.nbytes if report.workers else 0, report.nbytes, report.workers)

    def abort(self, why: str = "aborted by the trainer") -> None:
        """Give the version up. Returns at once, and `wait` tells the outcome.

        It is "aborted", or "committed" if a worker had already loaded it. Workers that had not loaded it keep the
        weights that they have. An adapter under way is not stopped.
        """
        if not self.done():
            self.aborted = self.aborted or why
            self._on_abort(self)

    def done(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._future.done()

    def wait(self, timeout: float | None = None, *, for_: Literal["all", "committed"] = "all") -> PublishReport:
        """Wait for the report and return it. timeout: in seconds; None waits for ever.

        for_: "committed" returns as soon as one worker serves the version; the report then has those that do by now.
        "all" waits until every other worker has it too, has refused it or is lost.
        With mode "auto" workers take a version that is waited for sooner, see docs/weights.md.

        Raises WaitTimeout, after which it can be waited for again, WeightSyncError if the publisher itself failed, and
        InvalidField for another `for_`.
        """
        if for_ not in ("all", "committed"):
            raise InvalidField("for_", for_, "'all' or 'committed'")
        if timeout != 0 and not self.awaited:
            self.awaited = True
            self._hasten()
        waited = self._future if for_ == "all" or self._future.done() else self._first
        try:
            return waited.result(timeout)
        except TimeoutError:
            raise WaitTimeout(f"version {self.version} is still on its way after {timeout} s") from None

    def committed(self, timeout: float | None = None) -> PublishReport:
        """Wait like `wait`, for a version that has to be served. Raises WeightSyncError unless it was committed."""
        report = self.wait(timeout)
        if report.state != "committed":
            name = f"version {report.version}" + (f" of adapter {report.adapter}" if report.adapter else "")
            said = [f"{worker}: {why}" for worker, why in sorted(report.failures.items())]
            raise WeightSyncError(f"{name} is served by nobody ({report.state}): {'; '.join(said)}")
        return report

    def _committed(self, report: PublishReport) -> None:
        if not self._first.done():
            self._first.set_result(report)

    def _end(self, outcome: Future[PublishReport]) -> None:
        if not self._first.done():
            if (error := outcome.exception()) is not None:
                self._first.set_exception(error)
            else:
                self._first.set_result(outcome.result())


@dataclass(slots=True)
class Publication:
    """A publication until its report: what is sent, and since when. config: a LoRA adapter's. after: what it waits for,
    None for nothing; it is not superseded then, and may have been published before."""

    packed: PackedWeights
    handle: PublishHandle
    began: float
    adapter: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    after: Future[None] | None = None

    @property
    def may_begin(self) -> bool:
        """Whether what it waits for has come."""
        return self.after is None or self.after.done()

    @property
    def name(self) -> str:
        """The version's name in logs and errors."""
        version = f"version {self.packed.version}"
        return f"{version} of adapter {self.adapter}" if self.adapter else version

    def tell(self, state: State, **found: Any) -> None:
        """Give the handle its report. found: the report's other fields."""
        self.handle._future.set_result(self.report(state, **found))

    def tell_committed(self, workers: tuple[str, ...]) -> None:
        """Tell those that wait for the first worker."""
        self.handle._committed(self.report("committed", workers=workers))

    def report(self, state: State, **found: Any) -> PublishReport:
        """Make its report. found: the report's other fields."""
        seconds = time.monotonic() - self.began
        return PublishReport(self.packed.version, state, seconds=seconds, adapter=self.adapter, **found)
