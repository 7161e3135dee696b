"""What clients and time do to a pool: the machine's rules of submitting, cancelling, taking results, deadlines."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from support.redis.machine_calls import AMPLE, CLIENTS, HOUR_MS, PREFIX, PoolCalls, index, twice
from support.redis.model import CLASSES, Job

specs = st.tuples(
    st.sampled_from((None, None, None, 0, 1)),  # None: a new job; else one that was submitted before
    st.sampled_from((2, 3, 1)),  # samples
    st.integers(0, CLASSES - 1),
    st.sampled_from(CLIENTS),
    st.sampled_from(("", "g1")),
    st.sampled_from((0, 0, 0, 1, 2, 3)),  # min_version
    st.sampled_from((None, None, 0, 1)),  # max_staleness
    st.booleans(),  # with a deadline
    st.integers(1, 40),  # bytes
    st.sampled_from(("", "", "w1", "", "w2")),  # the worker it prefers
)


class ClientRules(PoolCalls):
    """Submits jobs, cancels them, takes or forgets their results."""

    @rule(batch=st.lists(specs, min_size=1, max_size=4), room=st.sampled_from((9, 9, 9, 0, 1, 2)), again=twice)
    def enqueue(self, batch: list[tuple[Any, ...]], room: int, again: bool) -> None:
        jobs: list[Job] = []
        for known, *fields in batch:
            if known is None or not self.submitted:
                self.made += 1
                fields[-2] = "p" * fields[-2]
                self.submitted.append([f"{self.made:032x}", *fields])
            jobs.append(Job(*self.pick(self.submitted, known or 0)))
        self.submit(jobs, room, again)

    @precondition(lambda self: self.model.dead)
    @rule(which=index, room=st.sampled_from((9, 1, 0)), again=twice)
    def requeue(self, which: int, room: int, again: bool) -> None:
        """A dead letter's job once more, under an id of its own, instead of the letter."""
        letter = self.pick(list(self.model.dead), which)
        job = self.model.jobs[self.model.dead[letter]["id"]]
        self.made += 1
        self.submitted.append([f"{self.made:032x}", job.n, job.cls, job.client, "", 0, None, False, job.payload])
        self.submit([Job(*self.submitted[-1])], room, again, letter)

    def submit(self, jobs: list[Job], room: int = 9, again: bool = False, letter: str = "") -> None:
        counts, unread = self.model.counts, self.model.unread
        caps = (counts["jobs"] + room if room < 9 else AMPLE, AMPLE, AMPLE)
        if room == 0:  # no room by bytes, or by what this client has not taken
            caps = (AMPLE, self.model.kept() + 30, 200)
        args: list[Any] = [*caps, letter]
        for job in jobs:
            staleness, deadline = "" if job.staleness is None else job.staleness, HOUR_MS if job.deadline else ""
            args += [
                job.id, job.payload, job.n, job.cls, job.client, job.min_version, staleness, deadline, job.group, "",
                job.record().get("P", ""), "h" + job.payload, "",
            ]  # fmt: skip
        answer, second = self.send("enqueue", *args, again=again)

        queues = [self.state.queue(cls) for cls in range(CLASSES)]
        expected: list[Any] = []
        for job in jobs:
            known = self.model.jobs.get(job.id)
            why = None if known else self.misfit(job, caps)
            if why:
                expected += ["BUSY", why, counts["jobs"], self.model.kept(), unread[job.client]]
                break
            expected.append(known.state if known else "new")
            if not known:
                self.model.accept(job)
                queues[job.cls].append(job.id)
                queues[job.cls].sort(key=lambda id: (self.model.jobs[id].turn, id))
        if letter and "BUSY" not in expected:
            fields = self.model.dead.pop(letter)
            counts["letters"] -= 64 + sum(len(fields[it]) for it in ("cause", "host", "error", "payload"))
        assert answer == expected, f"{answer}, not {expected}"
        assert second is None or second == ["q" if word == "new" else word for word in answer]
        self.settle()
        assert [self.state.queue(cls) for cls in range(CLASSES)] == queues, "at their turns"
        if "BUSY" not in answer:
            self.remember("enqueue", *args)

    def misfit(self, job: Job, caps: tuple[int, int, int]) -> str | None:
        """Why it may not come in now."""
        counts = self.model.counts
        if self.model.unread[job.client] > caps[2]:
            return "unread"
        if counts["jobs"] == 0:
            return "bytes" if self.model.kept() - counts["bytes"] > caps[1] else None
        if counts["jobs"] >= caps[0]:
            return "jobs"
        return "bytes" if self.model.kept() + len(job.payload) > caps[1] else None

    @rule(which=st.lists(index, min_size=1, max_size=2), again=twice)
    def cancel(self, which: list[int], again: bool) -> None:
        ids = [self.pick(list(self.model.jobs) or ["f" * 32], i) for i in which]
        answer, second = self.send("cancel", "no more", *ids, again=again)
        running = [id for id in ids if id in self.model.jobs and self.model.jobs[id].state == "r"]
        assert answer == [self.cancelled(id, "no more") for id in ids]
        assert second is None or second == [
            self.model.jobs[id].state if id in self.model.jobs else "unknown" for id in ids
        ]
        if running:
            (_, rung), *_ = self.redis.xrevrange(f"{PREFIX}bell", count=1)
            assert rung == {"kind": "cancel", "ids": " ".join(dict.fromkeys(running))} or again
        if "unknown" not in answer:
            self.remember("cancel", "no more", *ids)

    def cancelled(self, id: str, cause: str) -> str:
        job = self.model.jobs.get(id)
        if job is None or not job.open:
            return job.state if job else "unknown"
        self.model.fail(job, "cancelled", cause)
        return "ok"

    @rule(client=st.sampled_from(CLIENTS), group=st.sampled_from(("", "g1", "own")), again=twice)
    def cancel_client(self, client: str, group: str, again: bool) -> None:
        mine = [job for job in self.model.open_jobs() if job.client == client]
        if group == "own":
            group = mine[-1].id if mine else "nobody"
        answer, second = self.send("cancel_client", client, group, "all", 0, 512, again=again)
        wanted = [job for job in mine if group in ("", job.group or job.id)]
        for job in wanted:
            self.model.fail(job, "cancelled", "all")
        assert answer == ["0", len(wanted)]
        assert second in (None, ["0", 0])

    @precondition(lambda self: any(self.model.streams.values()))
    @rule(client=st.sampled_from(CLIENTS), count=st.sampled_from((1, 2, 9)), again=twice)
    def ack(self, client: str, count: int, again: bool) -> None:
        stream = self.model.streams.get(client, {})
        taken = list(stream)[:count]
        args: list[Any] = []
        for entry in ["1-1", *taken, *taken[:1]]:  # one that is gone, and one said twice
            args += [entry, 64 + sum(len(stream.get(entry, {}).get(name, "")) for name in "mche")]
        self.send("ack", client, "", *args, again=again)
        self.model.take(client, taken)

    @precondition(lambda self: any(self.model.streams.values()))
    @rule(client=st.sampled_from(CLIENTS))
    def replies_expire(self, client: str) -> None:
        """Nobody came for a week."""
        self.redis.delete(f"{PREFIX}reply:{client}")
        self.model.streams.pop(client, None)

    @precondition(lambda self: any(job.deadline and not job.overdue for job in self.model.open_jobs()))
    @rule(which=index)
    def deadline_passes(self, which: int) -> None:
        job = self.pick([job for job in self.model.open_jobs() if job.deadline and not job.overdue], which)
        then = self.redis.time()[0] * 1000 - 5000
        self.redis.hset(f"{PREFIX}job:{job.id}", "e", then)
        self.redis.zadd(f"{PREFIX}deadlines", {job.id: then})
        job.overdue = True

    @precondition(lambda self: self.preferring())
    @rule(which=index)
    def preference_lapses(self, which: int) -> None:
        self.lapse(self.pick(self.preferring(), which))

    def preferring(self) -> list[Job]:
        return [job for job in self.model.open_jobs() if (job.prefers or job.moving_to) and not job.lapsed]

    def lapse(self, job: Job) -> None:
        self.redis.hincrby(f"{PREFIX}job:{job.id}", "t", -2 * HOUR_MS)
        self.redis.zadd(f"{PREFIX}prefers", {job.id: self.redis.time()[0] * 1000 - HOUR_MS}, xx=True)
        job.lapsed = True

    @rule(budget=st.sampled_from((1, 2, 256)), again=twice)
    def overdue(self, budget: int, again: bool) -> None:
        answer, second = self.send("overdue", budget, "", 0, "", again=again and budget == 256)
        assert answer[0] == self.ended_overdue(budget)
        assert second is None or second[0] == 0

    def ended_overdue(self, budget: int) -> int:
        late = sorted((score, id) for id, score in self.state["deadlines"].items())
        jobs = [self.model.jobs[id] for _, id in late if self.model.jobs[id].open and self.model.jobs[id].overdue]
        for job in jobs[: max(budget, 0)]:
            self.model.end_overdue(job)
        return len(jobs[: max(budget, 0)])
