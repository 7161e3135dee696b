"""Takes in what a worker has claimed: jobs that can run here begin, the others are ended or given back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...messages.broker import Claim
from ...messages.errors import RequestRefused
from ...messages.model import GenerateJob
from ..engine import AdapterMissing, Engine
from ..jobs import HeldJob, HeldJobs, MustFetch, admit_all, admit_fetched
from ..text import Tokenizer, ToolReader
from .claims import ClaimLoop
from .deadlines import Deadlines
from .handback import Handback
from .saving import Saving


class Admission:
    """Admits the claims of one worker.

    begin(held): runs the samples of an admitted job. lacks(claim, error): decides about a job whose adapter is not
    here; Redis is asked, and may not answer.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        tools: ToolReader,
        held: HeldJobs,
        claims: ClaimLoop,
        *,
        handback: Handback,
        deadlines: Deadlines,
        saving: Saving,
        media_hosts: frozenset[str],
        begin: Callable[[HeldJob], None],
        lacks: Callable[[Claim, AdapterMissing], Awaitable[None]],
    ) -> None:
        self._engine, self._tokenizer, self._tools = engine, tokenizer, tools
        self._held, self._claims, self._handback = held, claims, handback
        self._deadlines, self._saving = deadlines, saving
        self._media_hosts = media_hosts
        self._begin, self._lacks = begin, lacks

    async def admit(self, claimed: list[Claim]) -> None:
        """Admit claimed jobs. Those whose media must be fetched are admitted beside further claims."""
        missing: list[tuple[Claim, AdapterMissing]] = []
        async for claim, admitted in admit_all(claimed, self._engine.info, self._tokenizer):
            if isinstance(admitted, MustFetch):
                self._claims.admit_aside(claim, self._admit_fetched(claim, admitted))
            elif isinstance(admitted, AdapterMissing):
                missing.append((claim, admitted))
            else:
                self._hold(claim, admitted)
        for claim, error in missing:  # last: Redis is asked, and may not answer
            await self._lacks(claim, error)

    def claimed(self) -> list[tuple[Claim, float]]:
        """The claims of all jobs that are held, or whose media are fetched, each with its age in seconds, about."""
        held = [(one.claim, max((run.age_s for run in one.samples.values()), default=0.0)) for one in self._held]
        return [*held, *((claim, 0.0) for claim in self._claims.aside)]

    async def _admit_fetched(self, claim: Claim, later: MustFetch) -> None:
        admitted = await admit_fetched(claim, later, self._engine.info, self._tokenizer, self._media_hosts)
        if isinstance(admitted, AdapterMissing):
            await self._lacks(claim, admitted)
        else:
            self._hold(claim, admitted)

    def _hold(self, claim: Claim, admitted: HeldJob | Exception) -> None:
        if isinstance(admitted, HeldJob):
            self._held.add(admitted)
            if isinstance(admitted.job, GenerateJob) and admitted.job.tools:
                self._tools.warm(admitted.job)
            self._deadlines.look(admitted.deadline)
            self._saving.stream(admitted, self._tokenizer.decode)
            self._begin(admitted)
        else:
            kind = "refused" if isinstance(admitted, RequestRefused) else "not readable"
            self._handback.bury(claim.job_id, claim.attempt, kind, admitted)
