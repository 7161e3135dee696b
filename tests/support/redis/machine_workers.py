"""What workers do to a pool: the state machine's rules of leases, claims, publishing, saving, giving back."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from support.redis.machine_calls import HOUR_MS, PREFIX, index, twice
from support.redis.machine_clients import ClientRules, specs
from support.redis.model import CLASSES, Job
from support.redis.model_claim import Claiming, check_choice, check_places, waiting

NOBODY = "e" * 32
tokens = st.tuples(index, st.sampled_from(("", "", "", "worker", "old", "attempt")))


class WorkerRules(ClientRules):
    """Up to three workers at a time; those that are gone may still send something."""

    @initialize(batch=st.lists(specs, min_size=3, max_size=6), max_lost=st.sampled_from((2, 3)), suspects=st.booleans())
    def begin(self, batch: list[tuple[Any, ...]], max_lost: int, suspects: bool) -> None:
        """Two workers, and the first has work, or dies of it: what comes then is rarely about nothing."""
        self.model.max_lost = max_lost
        self.join(False)
        self.join(False)
        self.enqueue(batch, 9, False)
        if self.take(Claiming("w1", 2, 9, 3)):
            self.checkpoint([((0, ""), 0, 0)], False)
            self.checkpoint([((0, ""), 0, 0)], False)
        if suspects and max_lost == 2:
            self.settle()
            self.crash(0, False)

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
        assert answer[:4] == ["OK", 0, self.model.committed, 0]
        assert second is None or second[:4] == answer[:4]
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
        assert answer[:4] == ["OK", len(self.model.held(worker)), self.model.committed, 0]
        self.model.workers[worker] = False

    @precondition(lambda self: self.model.workers)
    @rule(which=index)
    def lease_ends(self, which: int) -> None:
        worker = self.pick(list(self.model.workers), which)
        self.redis.zadd(f"{PREFIX}workers", {worker: 1})
        self.model.workers[worker] = True

    @precondition(lambda self: self.model.workers)
    @rule(which=index, strays=st.booleans())
    def crash(self, which: int, strays: bool) -> None:
        """Strays: ids under its name that are another's, or nobody's."""
        holding = [worker for worker in self.model.workers if self.model.held(worker)]
        worker = self.pick(holding or list(self.model.workers), which)
        self.redis.zadd(f"{PREFIX}workers", {worker: 1})
        self.model.workers[worker] = True
        if strays:
            others = [job.id for job in self.model.jobs.values() if job.owner != worker]
            self.redis.sadd(f"{PREFIX}held:{worker}", NOBODY, *others[-3:])
            self.state = self.look()
        self.reap(256, False)
        self.join(False)

    @precondition(lambda self: list(self.model.workers.values()).count(False) > 1)
    @rule(cls=st.integers(0, CLASSES - 1), lapses=st.sampled_from(("", "before", "after")), own=st.booleans())
    def prefer(self, cls: int, lapses: str, own: bool) -> None:
        """A job prefers one worker and another one claims; then, perhaps, the one it prefers."""
        one, other, *_ = (worker for worker, over in self.model.workers.items() if not over)
        self.made += 1
        self.submit([Job(f"{self.made:032x}", 1, cls, "ca", "", 0, None, False, "p", one)])
        job = self.model.jobs[f"{self.made:032x}"]
        if lapses == "before":
            self.lapse(job)
        self.settle()
        self.take(Claiming(other, 9, 99, 3))
        self.settle()
        if lapses == "after":
            self.lapse(job)
            self.settle()
            self.reap(256, False)
            self.settle()
        if own:
            self.take(Claiming(one, 9, 99, 3))
            self.settle()
            if job.owner == one:  # given back, it prefers nobody
                assert self.call("release", one, self.model.max_lost, "", job.id, job.attempt, 0, 0) == ["ok"]
                self.model.requeue(job)
                self.settle()
                self.take(Claiming(other, 9, 99, 3))

    @precondition(lambda self: len(self.model.workers) > 1)
    @rule(which=index, again=twice)
    def leave(self, which: int, again: bool) -> None:
        worker = self.worker(which)
        answer, second = self.send("leave", worker, again=again)
        assert answer == len(self.model.held(worker))
        assert second in (None, answer)
        if answer == 0:
            self.model.workers.pop(worker, None)
            for id in self.state["prefers"]:
                self.model.gone(id)

    @precondition(lambda self: self.model.workers)
    @rule(which=index)
    def record_is_gone(self, which: int) -> None:
        """A worker gives back a job whose record was evicted: then it is not held any more."""
        worker = self.pick(list(self.model.workers), which)
        self.redis.sadd(f"{PREFIX}held:{worker}", NOBODY)
        assert self.call("release", worker, self.model.max_lost, "", NOBODY, 1, 0, 0) == ["fenced"]

    @rule(budget=st.sampled_from((1, 2, 256, 256)), again=twice)
    def reap(self, budget: int, again: bool) -> None:
        expired = any(n and f"reply:{client}" not in self.state.keys for client, n in self.model.unread.items())
        answer, second = self.send("reap", self.model.max_lost, budget, again=again and budget == 256 and not expired)
        after, lists = self.look(), self.lists()
        requeued = dead = removed = 0
        left = budget  # for jobs and workers together
        for worker in sorted(worker for worker, over in self.model.workers.items() if over):
            if left <= 0:
                break
            held = self.state[f"held:{worker}"]
            taken = held - after[f"held:{worker}"]
            assert len(taken) == min(left, len(held))
            for id in sorted(taken):
                job = self.model.jobs.get(id)
                if job is None or job.owner != worker:
                    continue
                if self.model.lose(job, "its worker was lost {} times", worker):
                    dead += 1
                else:
                    requeued += 1
                    self.put_back(job, lists)
            left -= len(taken) + 1
            if taken == held:
                self.model.workers.pop(worker)
                removed += 1
                self.model.counts["leases_lost"] += 1
                number = self.state[f"worker:{worker}"].get("number", "")
                waits = [score for cls in range(CLASSES) for score in self.state.later(cls).values()]
                left -= waits.count(-float(number)) if number else 0
        expired_now = self.ended_overdue(left)
        left -= expired_now
        waits = {id: 0 if self.model.gone(id) else score for id, score in self.state["prefers"].items()}
        over = sorted((score, id) for id, score in waits.items() if self.model.jobs[id].lapsed)
        undecided = [one for one in over if self.model.jobs[one[1]].open][: max(0, left)]
        for _, id in undecided:
            self.put_back(self.model.jobs[id], lists)
        assert answer == [requeued, dead, expired_now, removed, int(left - len(undecided) <= 0)]
        assert second in (None, [0, 0, 0, 0, 0])
        # One client per call whose stream has expired is not counted any more, whichever it is.
        gone = [client for client, n in self.model.unread.items() if n and client not in after["unread"]]
        assert len(gone) <= 1
        assert not any(f"reply:{client}" in after.keys for client in gone)
        for client in gone:
            self.model.forget_unread(client)
        for cls in range(CLASSES):
            queue = lists[f"queued:{cls}"]
            queue[:] = [id for id in queue if self.model.jobs[id].open]
        assert self.lists(after) == lists, "each at its turn"

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

    @precondition(lambda self: self.model.workers)
    @rule(which=index, jobs=st.sampled_from((9, 2, 1)), version=st.sampled_from((3, 3, 0)), patient=st.booleans())
    def claim_share(self, which: int, jobs: int, version: int, patient: bool) -> None:
        """As workers do. What others leave is its own, if it asks often enough: nothing waits for ever."""
        worker = self.worker(which)
        for other in [other for other in self.model.workers if patient and other != worker]:
            self.take(Claiming(other, 0, 99, version, 0))  # who has room for as much, and never comes for it
            self.settle()
        for waited in range(12 if patient else 1):
            held = sum(job.unpublished for job in self.model.held(worker))
            self.take(Claiming(worker, jobs, 99, version, held, waited))
            self.settle()
        if patient and self.model.workers.get(worker) is False and jobs == 9 and not self.state["suspects"]:
            alone = self.state[f"worker:{worker}"].get("alone") in self.state[f"held:{worker}"]
            left = [waiting(self.state, self.model, cls, worker, version) for cls in range(CLASSES)]
            assert alone or not any(left), "it asked and asked"

    claim_shares = claim_share

    def take(self, how: Claiming, again: bool = False) -> list[Job]:
        self.claims[how.worker] += 1
        limits = (how.max_jobs, how.max_samples, how.version, "", how.holds, 0, how.waited)
        answer, second = self.send("claim", how.worker, self.claims[how.worker], *limits, again=again)
        if self.model.workers.get(how.worker, True):
            assert answer == ["NOLEASE"]
            assert second in (None, answer)
            return []
        after, rows = self.look(), [answer[i : i + 7] for i in range(2, len(answer), 7)]
        check_choice(self.state, self.model, how, [row[0] for row in rows])
        check_places(self.state, self.model, how, after, [row[0] for row in rows])
        self.old_claims.append((how.worker, self.claims[how.worker], *limits))
        given: list[Job] = []
        for id, attempt, n, queued, left, payload, progress in rows:
            job = self.model.jobs[id]
            assert (int(attempt), int(n), payload) == (job.attempt + 1, job.n, job.payload)
            assert dict(zip(progress[::2], progress[1::2], strict=True)) == job.progress()
            assert int(queued) >= 0
            assert (0 < int(left) <= HOUR_MS) if job.deadline else left == ""
            if not job.suspect:
                self.model.now[job.cls] = max(self.model.now[job.cls], job.turn)
            self.model.claim(how.worker, job)
            self.tokens.append((how.worker, id, job.attempt))
            given.append(job)
        if second is not None:
            times = {3, 4}
            assert [x for i, x in enumerate(second[2:]) if i % 7 not in times] == [
                x for i, x in enumerate(answer[2:]) if i % 7 not in times
            ], "the same claim number gives the same jobs"
        for job in self.model.open_jobs():  # whose deadline passed, as far as this claim came across them
            if job.state == "q" and job.overdue and after[f"job:{job.id}"]["st"] == "expired":
                self.model.expire_queued(job)
        return given

    @precondition(lambda self: self.tokens)
    @rule(
        which=st.lists(st.tuples(tokens, st.sampled_from((0, 1, 2, 0, 1, 2, 9, -1))), min_size=1, max_size=4),
        again=twice,
    )
    def complete(self, which: list[tuple[tuple[int, str], int]], again: bool) -> None:
        worker = self.token(which[0][0])[0]
        said = [(*self.token(token)[1:], sample) for token, sample in which]
        self.publish(worker, [(id, attempt, self.sample(id, sample)) for id, attempt, sample in said], again)

    complete_more = complete_again = complete

    @precondition(lambda self: any(job.owner for job in self.model.open_jobs()))
    @rule(which=index)
    def save_and_finish(self, which: int) -> None:
        self.checkpoint([((which, ""), 0, 0)], False)
        self.settle()
        self.complete([((which, ""), 0)], False)

    def sample(self, id: str, sample: int) -> int:
        """One that the job has; 9 and -1: the first that it does not have, on either side."""
        n = self.model.jobs[id].n
        return {9: n, -1: -1}.get(sample, sample % n)

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
        """A next piece of a sample, or the last one again, or the first, or the second, or one after a gap."""
        job = self.model.jobs[id]
        count = len(job.pieces.get(sample % job.n, {}))
        number = (count, max(0, count - 1), 0, 1, count, count + 1, count, 0, 1, count)[which % 10]
        return sample % job.n, number, f"{worker}:{sample}:{number}:{which}"

    @precondition(lambda self: self.tokens)
    @rule(which=st.lists(st.tuples(tokens, st.integers(0, 2), index), min_size=1, max_size=4), again=twice)
    def checkpoint(self, which: list[tuple[tuple[int, str], int, int]], again: bool) -> None:
        worker = self.token(which[0][0])[0]
        said: list[tuple[str, int, int, int, str]] = []
        for token, sample, kind in which:
            _, id, attempt = self.token(token)
            said.append((id, attempt, *self.pieces(id, sample, kind, worker)))
        self.save(worker, said, again)
        if all(attempt <= self.model.jobs[id].attempt for id, attempt, *_ in said):
            self.saved.append((worker, said))

    checkpoint_more = checkpoint

    @precondition(lambda self: self.saved)
    @rule(which=index)
    def late_checkpoint(self, which: int) -> None:
        """It may undo what was saved since, but leaves no gap."""
        self.save(*self.pick(self.saved, which), False)

    def save(self, worker: str, said: list[tuple[str, int, int, int, str]], again: bool) -> None:
        def expected() -> list[str]:
            return [
                self.model.jobs[id].save(*piece) if self.model.owns(worker, id, attempt) else "fenced"
                for id, attempt, *piece in said
            ]

        args = [part for number, one in enumerate(said) for part in (*one, "1" if number % 2 else "")]
        answer, second = self.send("checkpoint", worker, *args, again=again)
        assert answer == expected()
        assert second is None or second == expected()

    @precondition(lambda self: self.tokens)
    @rule(
        which=st.lists(st.tuples(tokens, st.booleans(), st.lists(index, max_size=2)), min_size=1, max_size=3),
        again=twice,
    )
    def release(self, which: list[tuple[tuple[int, str], bool, list[int]]], again: bool) -> None:
        worker = self.token(which[0][0])[0]
        args: list[Any] = [worker, self.model.max_lost, ""]
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
        assert self.lists(self.look()) == lists, "at its turn, or with the suspects"
        self.remember("release", *args, claims=claims)

    release_more = release

    @precondition(lambda self: any(job.owner for job in self.model.open_jobs()))
    @rule(which=tokens, taker=index, claims=st.booleans(), again=twice)
    def move(self, which: tuple[int, str], taker: int, claims: bool, again: bool) -> None:
        """Released to a named worker, who perhaps claims it next."""
        worker, id, attempt = self.token(which)
        job, to = self.model.jobs[id], self.worker(taker)
        mine, there = self.model.owns(worker, id, attempt), self.model.workers.get(to) is False
        expected = "fenced" if not mine else "ok" if there and not job.lost else "kept"
        args = (worker, self.model.max_lost, to, id, attempt, 0, 0)
        answer, second = self.send("release", *args, again=again)
        assert answer == [expected]
        assert second in (None, ["kept" if expected == "kept" else "fenced"])
        if expected == "ok":
            self.model.move(job, to)
            self.settle()
            assert job.id in self.state.later(job.cls)
        if claims:
            self.take(Claiming(to, 9, 99, 3))

    move_again = move

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
