"""What workers do to a pool: the state machine's rules of leases, claims, publishing, saving, giving back."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from machine_calls import HOUR_MS, PREFIX, index, twice
from machine_clients import ClientRules, specs
from model import CLASSES, Job
from model_claim import Claiming, check_choice

tokens = st.tuples(index, st.sampled_from(("", "", "", "worker", "old", "attempt")))


class WorkerRules(ClientRules):
    """Up to three workers at a time; those that are gone may still send something."""

    @initialize(batch=st.lists(specs, min_size=3, max_size=6), max_lost=st.sampled_from((2, 3)))
    def begin(self, batch: list[tuple[Any, ...]], max_lost: int) -> None:
        """Two workers, and the first has work: what comes then is rarely about nothing."""
        self.model.max_lost = max_lost
        self.join(False)
        self.join(False)
        self.enqueue(batch, 9, False)
        if self.take(Claiming("w1", 2, 9, 3)):
            self.checkpoint([((0, ""), 0, 0)], False)
            self.checkpoint([((0, ""), 0, 0)], False)

    def token(self, which: tuple[int, str]) -> tuple[str, str, int]:
        """A claim that somebody holds; perhaps an older one, or said by another worker, or of another attempt."""
        running = [(job.owner, job.id, job.attempt) for job in self.model.open_jobs() if job.owner]
        worker, id, attempt = self.pick(self.tokens if which[1] == "old" or not running else running, which[0])
        if which[1] == "worker":
            worker = self.pick([other for other in self.claims if other != worker], which[0])
        return worker, id, attempt + 1 if which[1] == "attempt" else attempt

    def worker(self, which: int) -> str:
        """One that is there, as a rule; 8 and 9 any there ever was."""
        return str(self.pick(list(self.claims if which > 7 or not self.model.workers else self.model.workers), which))

    @precondition(lambda self: len(self.model.workers) < 3)
    @rule(again=twice)
    def join(self, again: bool) -> None:
        self.incarnations += 1
        worker = f"w{self.incarnations}"
        answer, second = self.send("heartbeat", worker, HOUR_MS, "status", 1, again=again)
        assert answer == ["OK", 0, self.model.committed, 0]
        assert second in (None, answer)
        self.model.workers[worker] = False
        self.claims[worker] = 0

    @precondition(lambda self: self.claims)
    @rule(which=index, again=twice)
    def heartbeat(self, which: int, again: bool) -> None:
        worker = self.worker(which)
        answer, _ = self.send("heartbeat", worker, HOUR_MS, "status", 0, again=again)
        if worker not in self.model.workers:
            assert answer == ["FENCED"]
            return
        assert answer == ["OK", len(self.model.held(worker)), self.model.committed, 0]
        self.model.workers[worker] = False

    @precondition(lambda self: self.model.workers)
    @rule(which=index)
    def lease_ends(self, which: int) -> None:
        worker = self.pick(list(self.model.workers), which)
        self.redis.zadd(f"{PREFIX}workers", {worker: 1})
        self.model.workers[worker] = True

    @precondition(lambda self: self.model.workers)
    @rule(which=index)
    def crash(self, which: int) -> None:
        worker = self.pick(list(self.model.workers), which)
        self.redis.zadd(f"{PREFIX}workers", {worker: 1})
        self.model.workers[worker] = True
        self.reap(256, False)
        self.join(False)

    @precondition(lambda self: len(self.model.workers) > 1)
    @rule(which=index, again=twice)
    def leave(self, which: int, again: bool) -> None:
        worker = self.worker(which)
        answer, second = self.send("leave", worker, again=again)
        assert answer == len(self.model.held(worker))
        assert second in (None, answer)
        if answer == 0:
            self.model.workers.pop(worker, None)

    @rule(budget=st.sampled_from((1, 2, 256, 256)), again=twice)
    def reap(self, budget: int, again: bool) -> None:
        expired = any(n and f"reply:{client}" not in self.state.keys for client, n in self.model.unread.items())
        answer, second = self.send("reap", self.model.max_lost, budget, again=again and budget == 256 and not expired)
        after, lists = self.look(), self.lists()
        requeued = dead = removed = 0
        for worker in sorted(worker for worker, over in self.model.workers.items() if over):
            held = self.state[f"held:{worker}"]
            taken = held - after[f"held:{worker}"]
            assert len(taken) == min(budget, len(held))
            for id in sorted(taken, reverse=True):
                job = self.model.jobs[id]
                if self.model.lose(job, "its worker was lost {} times", worker):
                    dead += 1
                else:
                    requeued += 1
                    self.put_back(job, lists)
            budget -= len(taken)
            if taken == held:
                self.model.workers.pop(worker)
                removed += 1
            if budget <= 0:
                break
        assert answer == [requeued, dead, self.ended_overdue(budget), removed]
        assert second in (None, [0, 0, 0, 0])
        # One client per call whose stream has expired is not counted any more, whichever it is.
        gone = [client for client, n in self.model.unread.items() if n and client not in after["unread"]]
        assert len(gone) <= 1
        assert not any(f"reply:{client}" in after.keys for client in gone)
        for client in gone:
            self.model.forget_unread(client)
        assert self.lists(after) == lists, "the oldest at the front of its queue"

    @precondition(lambda self: self.claims)
    @rule(
        which=index,
        jobs=st.sampled_from((2, 1, 4, 9, 0)),
        samples=st.sampled_from((9, 9, 4, 1, 0)),
        version=st.integers(0, 3).map(lambda i: 3 - i),
        again=twice,
    )
    def claim(self, which: int, jobs: int, samples: int, version: int, again: bool) -> None:
        self.take(Claiming(self.worker(which), jobs, samples, version), again)

    claim_more = claim_again = claim

    def take(self, how: Claiming, again: bool = False) -> list[Job]:
        self.claims[how.worker] += 1
        limits = (how.max_jobs, how.max_samples, how.version)
        answer, second = self.send("claim", how.worker, self.claims[how.worker], *limits, CLASSES, again=again)
        if self.model.workers.get(how.worker, True):
            assert answer == ["NOLEASE"]
            assert second in (None, answer)
            return []
        rows = [answer[i : i + 7] for i in range(0, len(answer), 7)]
        check_choice(self.state, self.model, how, [row[0] for row in rows])
        given: list[Job] = []
        for id, attempt, n, queued, left, payload, progress in rows:
            job = self.model.jobs[id]
            assert (int(attempt), int(n), payload) == (job.attempt + 1, job.n, job.payload)
            assert dict(zip(progress[::2], progress[1::2], strict=True)) == job.progress()
            assert int(queued) >= 0
            assert (0 < int(left) <= HOUR_MS) if job.deadline else left == ""
            self.model.claim(how.worker, job)
            self.tokens.append((how.worker, id, job.attempt))
            given.append(job)
        if second is not None:
            times = {3, 4}
            assert [x for i, x in enumerate(second) if i % 7 not in times] == [
                x for i, x in enumerate(answer) if i % 7 not in times
            ], "the same claim number gives the same jobs"
        after = self.look()
        for job in self.model.open_jobs():  # whose deadline passed, as far as this claim came across them
            if job.state == "q" and job.overdue and after[f"job:{job.id}"]["st"] == "expired":
                self.model.expire_queued(job)
        return given

    @precondition(lambda self: self.tokens)
    @rule(which=st.lists(st.tuples(tokens, st.integers(0, 2)), min_size=1, max_size=4), again=twice)
    def complete(self, which: list[tuple[tuple[int, str], int]], again: bool) -> None:
        worker = self.token(which[0][0])[0]
        said = [(*self.token(token)[1:], sample) for token, sample in which]
        self.publish(worker, [(id, attempt, sample % self.model.jobs[id].n) for id, attempt, sample in said], again)

    complete_more = complete_again = complete

    def publish(self, worker: str, finished: list[tuple[str, int, int]], again: bool = False) -> None:
        args: list[Any] = [worker]
        expected: list[str] = []
        for id, attempt, sample in finished:
            result = f"{worker}:{attempt}:{id[-4:]}:{sample}"
            args += [id, attempt, sample, result]
            expected.append(self.model.publish(worker, id, attempt, sample, result))
        answer, second = self.send("complete", *args, again=again)
        assert answer == expected
        for first, then in zip(answer, second or answer, strict=True):
            # What was refused may be of a job that the same batch has finished: then nobody needs it.
            assert second is None or then == "again" or (first, then) == ("fenced", "fenced")
        self.remember("complete", *args, claims=[(id, attempt) for id, attempt, _ in finished])

    def pieces(self, id: str, sample: int, which: int, worker: str) -> tuple[int, int, str]:
        """A next piece of a sample, or the last one again, or the first."""
        job = self.model.jobs[id]
        count = len(job.pieces.get(sample % job.n, {}))
        number = (count, max(0, count - 1), 0)[which % 3]
        return sample % job.n, number, f"{worker}:{sample}:{number}:{which}"

    @precondition(lambda self: self.tokens)
    @rule(which=st.lists(st.tuples(tokens, st.integers(0, 2), index), min_size=1, max_size=4), again=twice)
    def checkpoint(self, which: list[tuple[tuple[int, str], int, int]], again: bool) -> None:
        worker = self.token(which[0][0])[0]
        args: list[Any] = [worker]
        expected: list[str] = []
        seen: set[tuple[str, int]] = set()
        for token, sample, kind in which:
            _, id, attempt = self.token(token)
            piece = self.pieces(id, sample, kind, worker)
            if (id, piece[0]) in seen:  # a worker saves one piece of a sample at a time
                continue
            seen.add((id, piece[0]))
            mine = self.model.owns(worker, id, attempt)
            if mine:
                self.model.jobs[id].save(*piece)
            args += [id, attempt, *piece]
            expected.append("ok" if mine else "fenced")
        answer, second = self.send("checkpoint", *args, again=again)
        assert answer == expected
        assert second in (None, answer)

    checkpoint_more = checkpoint

    @precondition(lambda self: self.tokens)
    @rule(
        which=st.lists(st.tuples(tokens, st.booleans(), st.lists(index, max_size=2)), min_size=1, max_size=3),
        again=twice,
    )
    def release(self, which: list[tuple[tuple[int, str], bool, list[int]]], again: bool) -> None:
        worker = self.token(which[0][0])[0]
        args: list[Any] = [worker, self.model.max_lost]
        expected: list[str] = []
        lists, claims = self.lists(), list[tuple[str, int]]()
        for token, lost, kinds in which:
            _, id, attempt = self.token(token)
            job = self.model.jobs[id]
            claims.append((id, attempt))
            mine = self.model.owns(worker, id, attempt)
            unfinished = {kind % job.n: kind for kind in kinds}  # one piece of a sample at a time
            args += [id, attempt, int(lost), len(unfinished)]
            died = mine and lost and self.model.lose(job, "the engine under it died or failed {} times", worker)
            for sample, kind in unfinished.items():
                piece = self.pieces(id, sample, kind // 3, worker)
                args += piece
                if mine and not died:
                    job.save(*piece)
            if mine and not died:
                self.model.requeue(job)
                self.put_back(job, lists)
            expected.append("dead" if died else "ok" if mine else "fenced")
        answer, second = self.send("release", *args, again=again)
        assert answer == expected
        assert second is None or set(second) == {"fenced"}
        assert self.lists(self.look()) == lists, "at the front of its queue, or with the suspects"
        self.remember("release", *args, claims=claims)

    release_more = release

    @precondition(lambda self: self.tokens)
    @rule(which=tokens, script=st.sampled_from(("dead", "expire")), again=twice)
    def give_up(self, which: tuple[int, str], script: str, again: bool) -> None:
        worker, id, attempt = self.token(which)
        args = (worker, id, attempt) + (("why", "host", "text") if script == "dead" else ())
        answer, second = self.send(script, *args, again=again)
        assert answer == ("ok" if self.model.owns(worker, id, attempt) else "fenced")
        assert second in (None, "fenced")
        if answer == "ok" and script == "dead":
            self.model.fail(self.model.jobs[id], "dead", "why", "host", "text")
        elif answer == "ok":
            self.model.fail(self.model.jobs[id], "expired", "its deadline passed while it was running")
        self.remember(script, *args, claims=[(id, attempt)])
