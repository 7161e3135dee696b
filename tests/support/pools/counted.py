"""Engines that say what they generated: whether each token of a sample was generated once."""

from __future__ import annotations

from collections.abc import Iterable

from support.pools.pool import check_scripted, wait_replies

from rolloutmq.messages import Broker, GenerateJob, RolloutResult, SamplingParams
from rolloutmq.worker.engine import EngineOutput, EngineRequest
from rolloutmq.worker.scripted.engine import ScriptedEngine

LONG = SamplingParams(max_new_tokens=10_000)
"""Minutes of the engine's clock, if nobody makes it hurry."""


class CountedEngine(ScriptedEngine):
    """Notes its legs: sample, tokens before it, tokens of it. While `holds` is set it lets go of nothing."""

    def __init__(self, tokens_per_s: float = 100.0) -> None:
        super().__init__(tokens_per_s=tokens_per_s)
        self.legs: list[tuple[str, int, int]] = []
        self.begun: list[str] = []
        self.aborted: set[str] = set()
        self.ended: set[str] = set()
        self.holds = False

    async def generate(self, request: EngineRequest) -> EngineOutput:
        self.begun.append(request.request_id[:32])
        output = await super().generate(request)
        self.legs.append((request.request_id[:36], request.generated, len(output.token_ids)))
        return output

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id[:32])
        if not self.holds:
            super().abort(request_id)

    def end(self, job_id: str, sample: int) -> None:
        """Let a sample that runs have all its tokens now."""
        request_id = next(name for name in self._running if name.startswith(f"{job_id}{sample:04x}"))
        self.ended.add(request_id)
        super().abort(request_id)

    async def _stopped_early(self, request_id: str, seconds: float) -> bool:
        return await super()._stopped_early(request_id, seconds) and request_id not in self.ended


async def each_token_once(broker: Broker, jobs: Iterable[GenerateJob], *engines: CountedEngine) -> list[RolloutResult]:
    """Every sample came once, with the tokens that it must have, each of which was generated once."""
    wanted = {(job.id, n) for job in jobs for n in range(job.n)}
    found: list[RolloutResult] = []
    for reply in await wait_replies(broker, len(wanted)):
        assert isinstance(reply.outcome, RolloutResult), reply.outcome
        found.append(reply.outcome)
    assert {(one.job_id, one.sample) for one in found} == wanted
    for one in found:
        check_scripted(one, 3)
        stream, done = f"{one.job_id}{one.sample:04x}", 0
        for before, count in sorted((b, c) for engine in engines for name, b, c in engine.legs if name == stream):
            assert before == done, f"{stream}: tokens {done} to {before}"
            done += count
        assert done == len(one.token_ids)
    return found
