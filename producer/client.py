"""The trainer's client: submit jobs, take results as they finish or by group, and ask for batches, streams, tasks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from ..messages.arguments import checks_arguments
from ..messages.broker import Broker, Caps, PoolLoad, RecordedSessions, SessionSummary
from ..messages.errors import RolloutMQError
from ..messages.journal import Journal
from ..messages.model import (
    GenerateJob,
    JobFields,
    QueueFields,
    RewardResult,
    RolloutResult,
    SamplingParams,
    ScoreResult,
    SharedFields,
    TurnFields,
    WorkerStatus,
)
from .calls import Delta, Groups, Mapped, Prompt, Results, Session, Streams, as_jobs, generate, tasks
from .control import PoolControl
from .core import ClientCore, jobs_given
from .episodes import Environment, Episode, EpisodeLimits, RecordedSession, run_episodes, take_session
from .inbox import Group, Handle, JobHandle, Outcome
from .training import GroupRules, RolloutFeed, Staleness

__all__ = ["Group", "JobHandle", "Outcome", "RolloutClient"]
MAX_OUTSTANDING = 1 << 18


@checks_arguments(GenerateJob, Handle, Caps, Journal, Path, Staleness, GroupRules, EpisodeLimits)
class RolloutClient:
    """An asyncio client of one pool, for one task or many of one event loop. On another loop it raises WrongLoop.

    Guarantees: a job that `submit` returned for is accepted, and reaches this client as all its results or as the
    results it got and one JobFailure. Within a process every outcome is handed out exactly once. An outcome stays on
    the reply stream until the code that took it comes back for the next one (or `wait` returned it): a client that
    crashes and starts again under the same `client_id` gets what it had not finished with. The last outcome of a loop
    that was left, by `break` or by an error, stays until its task (or thread) begins another loop over outcomes. If
    that task has ended, the next loop that any task begins counts. Closing the client does not count.

    Results, failures and groups know their job's `metadata` and, in `prompt_ids`, its prompt. After a restart with the
    same `client_id` that holds for jobs that are submitted again, and for those that were still open when the client
    opened and are no larger than 256 KiB. Of other jobs results have the metadata, and those of text the prompt.

    Every argument named `timeout` is in seconds (float); None waits for ever.

    Args:
        redis_url: the pool's Redis; by default $ROLLOUTMQ_REDIS, or the one on this host.
        pool: its name.
        client_id: name of the reply stream; by default a new one, whose unread results nobody will ask for again.
        max_outstanding: samples submitted and not taken yet; `submit` raises ClientBusy above it. This, times the size
            of a result and its prompt, bounds the client's memory. `map` keeps to a window instead.
        caps: where the pool answers PoolBusy to this client.
        before_ack: called before what was taken is acknowledged; False puts it off to a later call. For code that first
            makes durable what it took. Its argument says whether the client closes, which is the last call.
        journal: a folder, a URL, or a `messages.journal.Journal`, to which the client writes its jobs, what came of
            them and what its feed trained on. The journal of a folder or URL is closed with the client.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        pool: str = "default",
        *,
        client_id: str | None = None,
        max_outstanding: int = MAX_OUTSTANDING,
        caps: Caps | None = None,
        before_ack: Callable[[bool], bool] | None = None,
        journal: Journal | Path | str | None = None,
    ) -> None:
        self._core = ClientCore(
            redis_url, pool, client_id=client_id, max_outstanding=max_outstanding, caps=caps, before_ack=before_ack,
            journal=journal,
        )  # fmt: skip
        self._streams = Streams(self._core)
        self._feed: RolloutFeed | None = None

    @property
    def client_id(self) -> str:
        """Name of the reply stream."""
        return self._core.client_id

    @property
    def journal(self) -> Journal | None:
        """What was given for it, opened."""
        return self._core.journal

    @property
    def broker(self) -> Broker:
        """What the client puts jobs in with; for whoever needs more of the queue than this class has."""
        return self._core.broker

    @property
    def closed(self) -> bool:
        """Whether `aclose` was called: nothing can be submitted any more."""
        try:
            self._core.reader.check_open()
        except RolloutMQError:
            return True
        return False

    @property
    def repeats(self) -> int:
        """Outcomes that came again and that this client kept to itself: 0 unless a failover lost acknowledgements."""
        return self._core.inbox.repeats

    async def open(self) -> Self:
        """Connect. Raises RedisUnavailable. `async with` does it too, and so does the first call that needs it."""
        await self._core.open()
        return self

    async def aclose(self) -> None:
        """Acknowledge what was taken and disconnect, for good; jobs under way are not cancelled.

        Whoever waits for an outcome gets a RolloutMQError.
        """
        try:
            await self._streams.close()
        finally:
            await self._core.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    # --- jobs in ---------------------------------------------------------------------------------------------------

    async def submit(
        self, job: GenerateJob | None = None, /, *, timeout: float | None = 0.0, **fields: Unpack[JobFields]
    ) -> JobHandle:
        """Submit one job, given whole or by the fields of GenerateJob: `submit(token_ids=[…], n=8)`.

        timeout: seconds to wait for room in a full pool, as for `submit_many`; the job's own limit is `deadline_s`.
        Raises InvalidField (also for an unknown field, with where it belongs), PoolBusy, ClientBusy and
        FeatureUnavailable. The handle can be awaited for the results.
        """
        whole = job if job is not None else GenerateJob.build(**fields)
        return (await self.submit_many([whole], timeout=timeout))[0]

    async def submit_many(
        self, jobs: Iterable[GenerateJob], *, timeout: float | None = 0.0, progress: bool | str = False
    ) -> list[JobHandle]:
        """Submit jobs in order. progress: as for `map`; jobs then go in by the thousand.

        timeout: seconds to wait for room in a full pool; 0 raises PoolBusy at once, None waits for ever. If it is this
        client's own results that fill the pool, another task has to take some meanwhile. If PoolBusy is raised, its
        `accepted` first ones are in. FeatureUnavailable says that no worker of the pool can do what one of them asks
        for; nothing was sent then. A job whose outcome waits here to be taken (of an earlier client) is not sent again.
        """
        return await self._core.submit_many(jobs, timeout, progress)

    async def check(self, jobs: Iterable[GenerateJob]) -> None:
        """Raises FeatureUnavailable for the first job that no worker of the pool can run. `submit` does it, too."""
        await self._core.features.check(jobs_given(jobs))

    async def cancel(self, jobs: Sequence[Handle | str]) -> list[str]:
        """Cancel jobs (handles or ids). Each ends with a JobFailure unless it had ended already.

        Returns "ok" for each job, or the state in which it had ended.
        """
        return await self._core.cancel(jobs)

    async def stop(self, jobs: Sequence[Handle | str], timeout: float = 30.0) -> int:
        """End jobs with what they have; returns how many of them were open, when all have ended.

        Samples that are not finished come as results with finish_reason "abort" and the tokens they have; a job of
        which nothing was generated yet ends with a JobFailure, as cancelled. Raises WaitTimeout; they end all the same.
        """
        return await self._core.stop(jobs, timeout)

    async def cancel_group(self, group_id: str) -> int:
        """Cancel what this client has open of a group, an earlier client of the same id included; returns how many."""
        await self.open()
        states = await self.broker.cancel(self._core.inbox.group_jobs(group_id), "cancelled with its group")
        return states.count("ok")

    async def cancel_all(self) -> int:
        """Cancel everything this client has open; returns how many jobs that were."""
        return await self.broker.cancel_client(self.client_id)

    # --- results out -----------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Jobs not fully handed out yet."""
        return self._core.inbox.outstanding

    def results(self, timeout: float | None = None) -> AsyncIterator[Outcome]:
        """Outcomes as they arrive, until nothing is outstanding. Raises WaitTimeout if none comes for `timeout` s.

        Coming back for the next outcome acknowledges the one before. After `break` or an error the last one is
        acknowledged when the same task or thread begins its next loop: `results`, `groups` or `map`. Until then, and if
        the client closes before, a client that starts again under the same id gets it once more. Use `wait` for single
        jobs. What a session, a stream or `generate` has under way is theirs: it is neither given nor waited for here. A
        wait for the next outcome that is cancelled or times out has taken nothing, and the loop can go on.
        """
        return Results(self._core, timeout)

    def groups(self, timeout: float | None = None, *, progress: bool | str = False) -> AsyncIterator[Group]:
        """Groups as they become complete, until nothing is outstanding. progress: as for `map`. Else like `results`."""
        return Groups(self._core, timeout, progress)

    async def wait(self, job: Handle, timeout: float | None = None) -> list[RolloutResult]:
        """All results of one job, by sample number; the same as `await job.result(timeout)`.

        Raises WaitTimeout (nothing is lost, wait again), JobFailed if it ended without all of them, or RolloutMQError
        if somebody else took them from this client.
        """
        return await self._core.wait(job, timeout)

    async def ending(self, job: Handle, timeout: float | None = None) -> Group:
        """All that came of one job: its samples, by number, and its failure if that are not all. Else like `wait`."""
        return await self._core.ending(job, timeout)

    def map(
        self, jobs: Iterable[GenerateJob], *, window: int = 1024, timeout: float | None = None,
        progress: bool | str = False,
    ) -> AsyncIterator[Outcome]:  # fmt: skip
        """Submit `jobs` as results are taken, at most `window` of them outstanding; yields outcomes as they arrive.

        Waits while the pool is busy. Jobs may be a generator of any length: memory is bounded by the window.
        progress: True, or a name, shows a bar on a terminal's stderr and in notebooks; ConfigError without rich.
        In all else like `results`. Raises InvalidField, and WaitTimeout if no outcome comes for `timeout` s.
        """
        return Mapped(self._core, jobs, window, timeout, progress)

    # --- batches, streams, sessions --------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | None = None,
        n: int = 1,
        *,
        timeout: float | None = None,
        **fields: Unpack[SharedFields],
    ) -> list[Group]:
        """`n` samples of each prompt: a Group for each, in the order of the prompts.

        prompts: each is token ids, a text, or messages. fields: other fields of GenerateJob, the same for all prompts.
        What could not be generated is in its group's `failures`. Waits while the pool is busy. Raises InvalidField
        for what is no prompt, before anything is submitted, WaitTimeout if no group is complete for `timeout` s, and
        PoolBusy if the results of this call alone are more than a client may leave untaken (`Caps.unread`).
        Results are acknowledged on return. If the call raises or is cancelled, its open jobs are cancelled, and no
        other call is told of them; groups that were complete wait for `results` or `groups`.
        """
        jobs = as_jobs(prompts, **fields, n=n, **({} if sampling is None else {"sampling": sampling}))
        return await generate(self._core, jobs, timeout)

    def stream(
        self, job: GenerateJob | Handle | None = None, /, *, timeout: float | None = None, **fields: Unpack[JobFields]
    ) -> AsyncGenerator[Delta]:
        """What a job generates, while it does: its samples' tokens in pieces, each sample's last one with its result.

        A job is submitted (as by `submit`, with `stream` on); for a handle, what is there comes first.
        Other calls of this client do not hand out its outcomes meanwhile. Coming back acknowledges like `results`.
        Raises InvalidField at once, and in the loop what `submit` raises, JobFailed, and WaitTimeout if nothing comes
        for `timeout` s: nothing is lost then, stream the handle again.
        """
        return self._streams.of(job if job is not None else GenerateJob.build(**fields), timeout)

    def session(
        self,
        *,
        session_id: str | None = None,
        system: str | None = None,
        token_ids: Sequence[int] | npt.NDArray[Any] | None = None,
        chat: bool = False,
        **fields: Unpack[TurnFields],
    ) -> Session:
        """A conversation, one turn after the other, on the worker that has its beginning in its cache; see Session.

        session_id: its name in results; by default a new one. system: the first message of a chat. token_ids: given
        tokens that it begins with. chat: texts are a user's messages; with a system message they are in any case.
        fields: those of GenerateJob, for every turn. Raises InvalidField.
        """
        return Session(
            self._core, self._streams, session_id=session_id, system=system, token_ids=token_ids, chat=chat, **fields
        )

    def episodes(
        self,
        tasks: Iterable[Any],
        environment: Callable[[Any], Environment],
        *,
        n: int = 1,
        limits: EpisodeLimits = EpisodeLimits(),  # noqa: B008
        run: str | None = None,
        start: int = 0,
        concurrency: int = 256,
        repeat: Path | str | None = None,
        **fields: Unpack[TurnFields],
    ) -> AsyncGenerator[Episode]:
        """Plays episodes between the model and environments; yields each as it ends. See docs/agents.md.

        tasks: a generator of any length. environment(task): the Environment of one episode; returns at once, so what
        takes time belongs into `reset`. n: episodes of each task. concurrency: episodes begun and not handed out yet.
        fields: of GenerateJob, for every turn; a `seed` gives each its own. repeat: a journal whose steps count again.

        What goes wrong is told by `stop` and `error` of an episode. Coming back for the next one acknowledges the one
        before. Leaving the loop cancels the others and closes their environments.
        run: name of a run that can be resumed; start: number of the first task. A client that starts again under the
        same client_id, with the same run, tasks, fields and limits, begins again what was not handed out. Answers that
        were complete are not generated again. Raises InvalidField, and RedisUnavailable.
        """
        return run_episodes(
            self._core, tasks, environment, n=n, limits=limits, run=run, start=start, concurrency=concurrency,
            repeat=repeat, fields=fields,
        )  # fmt: skip

    # --- recorded sessions -----------------------------------------------------------------------------------------

    def sessions(self, tenant: str = "default") -> AsyncGenerator[SessionSummary]:
        """Sessions that gateways have recorded for a tenant, in no order; see SessionSummary. Raises InvalidField."""
        return RecordedSessions(self.broker).listed(tenant)

    async def take_session(self, name: str, tenant: str = "default", *, timeout: float | None = 0.0) -> RecordedSession:
        """Close a recorded session, which takes no turns from then on, and return it; again as often as it is asked.

        timeout: seconds to wait for its first turn. Raises InvalidField, NoSuchSession, or WaitTimeout after a wait.
        """
        return await take_session(RecordedSessions(self.broker), name, tenant, timeout)

    async def forget_session(self, name: str, tenant: str = "default") -> bool:
        """Delete a recorded session; returns whether there was one. For an hour its name takes no further turns."""
        return await RecordedSessions(self.broker).forget(tenant, name)

    # --- a trainer's feed ------------------------------------------------------------------------------------------

    def feed(
        self, staleness: Staleness, rules: GroupRules = GroupRules(), *, version: int = 0, reproducible: bool = False  # noqa: B008
    ) -> RolloutFeed:  # fmt: skip
        """Groups for a trainer, with its staleness under control and books that survive restarts; see RolloutFeed.

        version: the trainer's at first. reproducible: see docs/staleness.md. Raises RolloutMQError for a second one."""
        if self._feed is not None:
            raise RolloutMQError(f"client {self.client_id} has a feed already: another trainer needs another client")
        self._feed = RolloutFeed(self._core, staleness, rules, version, reproducible=reproducible)
        return self._feed

    # --- embeddings, scores, rewards -------------------------------------------------------------------------------

    async def embed(
        self, inputs: Sequence[Any], *, dimensions: int | None = None, normalize: bool = True,
        timeout: float | None = None, **fields: Unpack[QueueFields],
    ) -> npt.NDArray[np.float32]:  # fmt: skip
        """(n, d) float32: the embedding of each input, in order.

        inputs: texts, sequences of token ids, or conversations (sequences of chat messages), all of one kind.
        dimensions, normalize: as EmbedJob has them. fields: such as priority, deadline_s and min_version.
        Raises InvalidField, FeatureUnavailable in a pool without a worker for it, JobFailed, or WaitTimeout after
        `timeout` seconds, which cancels what is left.
        """
        return await tasks.embed(self._core, inputs, dimensions, normalize, timeout, **fields)

    async def score(
        self, prompt: Any, continuations: Sequence[Any], *, timeout: float | None = None, **fields: Unpack[QueueFields]
    ) -> list[ScoreResult]:
        """How likely each continuation of `prompt` is: log-probabilities per token, their sum and mean, the version.

        prompt: token ids, a text, or a conversation. continuations: sequences of ids, or texts. Fields and errors as
        for `embed`.
        """
        return await tasks.score(self._core, prompt, continuations, timeout, **fields)

    async def reward(
        self, inputs: Sequence[Any], *, timeout: float | None = None, **fields: Unpack[QueueFields]
    ) -> list[RewardResult]:
        """A reward model's `scores` of each input, in order; `score` is the first of them.

        Inputs, fields and errors as for `embed`; an input of ids is prompt and response as one sequence.
        """
        return await tasks.reward(self._core, inputs, timeout, **fields)

    # --- looking around --------------------------------------------------------------------------------------------

    async def load(self) -> PoolLoad:
        """How much is queued, open and finished in the pool."""
        return await self.broker.load()

    async def workers(self) -> list[WorkerStatus]:
        """The pool's workers as of their last heartbeat."""
        return await self.broker.workers()

    @cached_property
    def control(self) -> PoolControl:
        """Commands to the pool's workers, over this client's connection."""
        return PoolControl._over(self.broker)
