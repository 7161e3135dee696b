"""What one claim may give, from what Redis held before it."""

from __future__ import annotations

from dataclasses import dataclass

from support.redis.model import CLASSES, Job, Model
from support.redis.state import State

SHARE = 8
SCAN = 64
WARD_MS = 10_000


@dataclass(frozen=True)
class Claiming:
    """A claim's arguments."""

    worker: str
    max_jobs: int
    max_samples: int
    version: int
    holds: int | str = ""  # samples that it says it holds; it gets its share then
    waited: int = 0  # claims in a row that gave nothing because of that


def waiting(before: State, model: Model, cls: int, worker: str, version: int) -> list[Job]:
    """The jobs of a class that a worker with `version` may have, in the order in which it gets them."""
    aside = before.later(cls).items()
    number = before[f"worker:{worker}"].get("number")
    own = {id for id, score in aside if number is not None and score == -float(number)}
    # By turns. Of one turn what was set aside goes first, and the oldest weights.
    places = {id: (0, score) for id, score in aside if 0 <= score <= version} | dict.fromkeys(
        before.queue(cls), (1, 0.0)
    )
    by_turn = sorted(places, key=lambda id: (model.jobs[id].turn, *places[id], id))
    found = [model.jobs[id] for id in sorted(own, key=lambda id: (model.jobs[id].turn, id)) + by_turn]
    return [
        job
        for job in found
        if job.state == "q"
        and not job.overdue
        and job.needs(model.committed) <= version
        and not model.left_to_another(job, worker)
    ]


@dataclass
class Suspects:
    """What a claim has to do about suspects. due: what it has to give, None if they have no say in it."""

    due: list[str] | None
    left: list[str]
    ward: str
    renewed: bool = False


def suspects_due(before: State, model: Model, how: Claiming) -> Suspects:
    """Who runs one has nothing else; who has the turn, or could have it, first runs out of what it holds."""
    held, ward, left = before[f"held:{how.worker}"], before["ward"], list(before["suspects"])
    if before[f"worker:{how.worker}"].get("alone") in held:
        return Suspects([], left, ward, ward == how.worker)
    if how.max_samples == 0:  # it only says that it takes nothing now
        return Suspects(None, left, ward)
    renewed = False
    assert len(left) <= SCAN, "more than one claim looks at: say what it does then"
    for job in (model.jobs[id] for id in before["suspects"]):
        if not job.open:
            left.remove(job.id)
        elif job.needs(model.committed) <= how.version:
            if ward not in ("", how.worker):
                break
            ward, renewed = how.worker, True
            if held:
                return Suspects([], left, ward, True)
            left.remove(job.id)
            if not job.overdue:
                return Suspects([job.id], left, ward, True)
    return Suspects(None, left, ward, renewed)


def check_places(before: State, model: Model, how: Claiming, after: State, given: list[str]) -> None:
    """Where jobs that wait are after a claim, and whose turn it is. To be called before the model claims them."""
    suspects = suspects_due(before, model, how)
    assert list(after["suspects"]) == suspects.left, "suspects that wait"
    assert after["ward"] == suspects.ward, "whose turn suspects are"
    if suspects.renewed:
        assert after.ttl["ward"] > WARD_MS - 2000, "the turn lasts from the last claim"
    elif suspects.ward:
        assert after.ttl["ward"] <= before.ttl["ward"], "a claim without a suspect keeps no turn"
    for cls in range(CLASSES):
        old, new = before.queue(cls), after.queue(cls)
        gone, later = old[: len(old) - len(new)], after.later(cls)
        assert old[len(gone) :] == new, f"class {cls}: taken from the front"
        for job in (model.jobs[id] for id in gone):
            aside = job.open and not job.overdue and job.id not in given
            assert (job.id in later) == aside, f"{job.id} was passed over"
            if aside and job.needs(model.committed) > how.version:
                assert later[job.id] == job.needs(model.committed), f"{job.id} was set aside"
            elif aside:
                assert model.left_to_another(job, how.worker), f"{job.id} was set aside"
                assert later[job.id] < 0


def check_choice(before: State, model: Model, how: Claiming, given: list[str]) -> None:
    """The right jobs, in the right order, as many as there was room for. To be called before the model claims them."""
    due = suspects_due(before, model, how).due
    if due is not None:
        assert given == due, "suspects run alone, one by one"
        return
    jobs = [model.jobs[id] for id in given]
    assert not any(id in before["suspects"] for id in given), "a suspect among others"
    samples = [job.n - len(job.published) for job in jobs]
    assert len(jobs) <= how.max_jobs
    assert not jobs or sum(samples[:-1]) < how.max_samples
    full = len(jobs) >= how.max_jobs or sum(samples) >= how.max_samples
    entries = sum(len(before[f"queued:{cls}"]) + len(before[f"later:{cls}"]) for cls in range(CLASSES))
    queues = [waiting(before, model, cls, how.worker, how.version) for cls in range(CLASSES)]
    taken = [[job for job in jobs if job.cls == cls] for cls in range(CLASSES)]
    for cls in range(CLASSES):
        if how.holds != "":  # it may have its share of what waits in one place, and not in another
            for place in (before.queue(cls), before.later(cls)):
                here = [job for job in queues[cls] if job.id in place]
                mine = [job for job in taken[cls] if job.id in place]
                assert [job.turn for job in mine] == sorted(job.turn for job in mine), f"class {cls}: by turns"
                assert place is not before.queue or mine == here[: len(mine)], f"class {cls}: by turns"
            continue
        assert taken[cls] == queues[cls][: len(taken[cls])], f"class {cls}: by turns"
        if entries < SCAN and not full:
            assert taken[cls] == queues[cls], f"class {cls}: there was room for more"
    if how.holds != "":
        return
    owed = [int(before["load"].get(f"owed{cls}", 0)) // SHARE for cls in range(CLASSES)]
    for cls in range(CLASSES):
        lower = range(cls + 1, CLASSES)
        if len(taken[cls]) < len(queues[cls]):
            assert all(len(taken[other]) <= owed[other] for other in lower), f"classes below {cls} went before it"
        if cls and len(taken[cls]) < min(owed[cls], len(queues[cls])):
            assert not any(taken[other] for other in range(cls)), f"class {cls} was owed more"
