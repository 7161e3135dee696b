"""Inputs that generate nothing run under the same gate as samples: interrupted or crossed by new weights, once more."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.pools.pool import eventually
from support.specimens.byte_tokenizer import Bytes

from rolloutmq.messages.broker.lease import Claim
from rolloutmq.messages.codec import encode
from rolloutmq.messages.errors import EngineDead, EngineError, RequestRefused
from rolloutmq.messages.model.chat import ChatMessage
from rolloutmq.messages.model.tasks import EmbedJob, RewardJob, ScoreJob, TaskJob
from rolloutmq.worker.engine.protocol import EngineInfo
from rolloutmq.worker.engine.tasks import TaskOutput, TaskRequest
from rolloutmq.worker.generation import Generation
from rolloutmq.worker.jobs.intake import admit
from rolloutmq.worker.jobs.task import TaskRun
from rolloutmq.worker.scripted.engine import ScriptedEngine


class Held(ScriptedEngine):
    """Answers when told to; an abort answers with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[TaskRequest] = []
        self.answers: dict[str, asyncio.Future[Any]] = {}

    async def perform(self, request: TaskRequest) -> TaskOutput:
        self.asked.append(request)
        self.answers[request.request_id] = asyncio.get_running_loop().create_future()
        output: TaskOutput = await self.answers[request.request_id]
        return output

    def abort_all(self) -> None:
        for answer in self.answers.values():
            if not answer.done():
                answer.set_result(TaskOutput())

    def answer(self, place: int, value: Any = None) -> None:
        """Answer request number `place` with its version, or with an error."""
        request = self.asked[place]
        waits = self.answers[request.request_id]
        if isinstance(value, BaseException):
            waits.set_exception(value)
        else:
            waits.set_result(TaskOutput(np.array([int(request.cache_key)], np.float32), finished=True))


class Outcomes:
    """A Generation with what became of its runs."""

    def __init__(self) -> None:
        self.engine = Held()
        self.finished: list[Any] = []
        self.refused: list[Any] = []
        self.failed: list[Any] = []
        self.deaths = 0
        self.generation = Generation(
            self.engine,
            8,
            on_finished=self.finished.append,
            on_refused=lambda run, error: self.refused.append((run, error)),
            on_failed=lambda run, error: self.failed.append((run, error)),
            on_dead=self._died,
        )

    def _died(self) -> None:
        self.deaths += 1

    async def asked(self, count: int) -> None:
        await eventually(lambda: len(self.engine.asked) == count, what=f"{count} requests")


@pytest.fixture
def outcomes() -> Outcomes:
    return Outcomes()


def run() -> TaskRun:
    job = ScoreJob(token_ids=[1, 2], continuations=[[3]])
    return TaskRun(job, np.array([1, 2, 3], np.int32), 0, 1, 0.0, start=2)


async def test_what_is_interrupted_is_asked_again_under_a_new_name_and_version(outcomes: Outcomes) -> None:
    generation, engine = outcomes.generation, outcomes.engine
    generation.add([run()])
    await outcomes.asked(1)
    async with generation.in_flight.quiet():
        assert generation.running == 0
        generation.state.version = 5
        assert len(engine.asked) == 1
    await outcomes.asked(2)
    engine.answer(1)
    await eventually(lambda: outcomes.finished, what="the answer")
    assert engine.asked[0].request_id != engine.asked[1].request_id
    assert (outcomes.finished[0].version, outcomes.finished[0].values.tolist()) == (5, [5.0])
    assert generation.generated_tokens == 0


@pytest.mark.parametrize("counted", [True, False])
async def test_what_new_weights_crossed_is_asked_again_and_what_had_ended_is_of_the_old(
    outcomes: Outcomes, counted: bool
) -> None:
    generation, engine = outcomes.generation, outcomes.engine
    generation.add([run()])
    await outcomes.asked(1)
    async with generation.in_flight.switching():
        engine.answer(0)
        generation.in_flight.switched(1, {engine.asked[0].request_id: 0} if counted else {})
        generation.state.version = 1
    if counted:
        await outcomes.asked(2)
        engine.answer(1)
    await eventually(lambda: outcomes.finished, what="the answer")
    assert (outcomes.finished[0].version, len(engine.asked)) == ((1, 2) if counted else (0, 1))


async def test_errors_end_as_those_of_samples_do(outcomes: Outcomes) -> None:
    generation, engine = outcomes.generation, outcomes.engine
    generation.add([run(), run(), run()])
    await outcomes.asked(3)
    for place, error in enumerate((RequestRefused("no"), EngineError("once"), EngineDead("gone"))):
        engine.answer(place, error)
    await eventually(lambda: generation.running == 0, what="their ends")
    assert (len(outcomes.refused), len(outcomes.failed), outcomes.deaths) == (1, 1, 1)
    assert len(generation.died_with) == 1
    assert generation.errors == {"refused": 1, "failed": 1, "dead": 1}
    assert generation.busy_since == 0.0


async def test_there_is_nothing_to_save_of_it_and_nothing_to_end_it_with(outcomes: Outcomes) -> None:
    one = run()
    outcomes.generation.add([one])
    await outcomes.asked(1)
    assert one.unsaved(lambda *_: None) is None
    outcomes.generation.end([one])
    outcomes.engine.abort_all()
    await outcomes.asked(2)
    outcomes.engine.answer(1)
    await eventually(lambda: outcomes.finished, what="the answer")
    assert outcomes.finished[0].finish_reason == "stop"


INFO = EngineInfo("e", "1", "m", "float32", "cpu", 300, 64, features=frozenset({"task:score", "task:reward"}))


def admitted(job: TaskJob, *published: int) -> dict[int, TaskRun]:
    held = admit(Claim(job.id, 1, job.n, 0.0, None, encode(job), frozenset(published)), INFO, Bytes())
    return {index: one for index, one in held.samples.items() if isinstance(one, TaskRun)}


def test_texts_are_tokenised_by_themselves_and_set_behind_the_prompt() -> None:
    runs = admitted(ScoreJob(text="ab", texts=("c", "de", "f")), 2)
    assert {index: (one.prompt.tolist(), one.start) for index, one in runs.items()} == {
        0: ([97, 98, 99], 2),
        1: ([97, 98, 100, 101], 2),
    }
    runs[1].values = np.array([-1.0, -2.0], np.float32)
    result = runs[1].result("w", INFO)
    assert (result.token_ids.tolist(), result.sum, result.mean) == ([100, 101], -3.0, -1.5)


def test_a_conversation_is_rendered_with_the_beginning_of_an_answer_only_where_one_is_scored() -> None:
    chat = (ChatMessage(role="user", content="hi"),)
    prompt = Bytes().encode_chat([{"role": "user", "content": "hi"}])
    (score,) = admitted(ScoreJob(messages=chat, texts=("a",))).values()
    assert score.prompt.tolist() == [*prompt, 97]
    whole = (*chat, ChatMessage(role="assistant", content="yo"))
    (rewarded,) = admitted(RewardJob(conversations=(whole,))).values()
    expected = Bytes().encode_chat([message.rendered() for message in whole], answer=False)
    assert rewarded.prompt.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (ScoreJob(token_ids=[1], continuations=[[1] * 64]), "input 0 has 65 tokens: at most 64"),
        (ScoreJob(token_ids=[1], continuations=[[2], [300]]), "input 1 has token 300: ids of this model are 0 to 299"),
        (EmbedJob(token_ids=[[1]]), "task:embed: not on this worker, whose e 1 has task:reward, task:score"),
    ],
)
def test_what_the_engine_cannot_take_is_refused_with_the_input(job: TaskJob, why: str) -> None:
    with pytest.raises(RequestRefused, match=why):
        admitted(job)
