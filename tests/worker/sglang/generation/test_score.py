"""Log-probabilities of given continuations on real SGLang; transformers on the same weights is the judge."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rolloutmq.messages.broker.lease import Claim
from rolloutmq.messages.codec import encode
from rolloutmq.messages.errors import RequestRefused
from rolloutmq.messages.model.jobs import GenerateJob
from rolloutmq.messages.model.tasks import ScoreJob
from rolloutmq.worker.engine.tasks import TaskRequest
from rolloutmq.worker.jobs.intake import admit
from rolloutmq.worker.sglang.engine import SGLangEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
PROMPT = list(range(5, 25))
TOLERANCE = 2e-4
"""Of a log-probability: both compute in float32, in another order."""
_number = iter(range(1 << 20))


def expected(reference: Any, ids: list[int], start: int) -> np.ndarray:
    """transformers' log-probabilities of ids[start:]."""
    import torch  # noqa: PLC0415

    with torch.no_grad():
        logprobs = torch.log_softmax(reference(torch.tensor([ids])).logits[0].float(), -1)
    return np.array([float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))], np.float32)


def request(ids: list[int], start: int, key: str = "0") -> TaskRequest:
    return TaskRequest(f"{next(_number):044x}", "score", np.array(ids, np.int32), key, start=start)


async def test_each_token_has_the_log_probability_transformers_gives_it(engine: SGLangEngine, reference: Any) -> None:
    # The same prompt again and again: from the second on most of it comes from the prefix cache.
    for length in (1, 2, 7, 60):
        ids = PROMPT + [(37 * i + length) % 512 for i in range(length)]
        output = await engine.perform(request(ids, len(PROMPT)))
        assert output.finished
        assert output.values.dtype == np.float32
        np.testing.assert_allclose(output.values, expected(reference, ids, len(PROMPT)), atol=TOLERANCE)
    output = await engine.perform(request(PROMPT, 1))  # all but the first
    np.testing.assert_allclose(output.values, expected(reference, PROMPT, 1), atol=TOLERANCE)


async def test_scores_run_beside_each_other_and_beside_generation(engine: SGLangEngine, reference: Any) -> None:
    all_ids = [PROMPT + [(11 * i + n) % 512 for i in range(1 + n % 9)] for n in range(40)]
    outputs = await asyncio.gather(*(engine.perform(request(ids, len(PROMPT))) for ids in all_ids))
    for ids, output in zip(all_ids, outputs, strict=True):
        np.testing.assert_allclose(output.values, expected(reference, ids, len(PROMPT)), atol=TOLERANCE)


async def test_what_was_aborted_says_so_and_can_be_asked_again(engine: SGLangEngine, reference: Any) -> None:
    ids = [PROMPT * 40 + [i] for i in range(30)]
    tasks = [asyncio.create_task(engine.perform(request(one, 1, key="abort"))) for one in ids]
    await asyncio.sleep(0)
    while not all(task.done() for task in tasks):
        engine.abort_all()
        await asyncio.wait(tasks, timeout=0.05)
    outputs = [task.result() for task in tasks]
    assert not all(output.finished for output in outputs)
    for one, output in zip(ids, outputs, strict=True):
        assert len(output.values) == (len(one) - 1 if output.finished else 0)
    again = await engine.perform(request(ids[0], len(ids[0]) - 1, key="abort"))
    np.testing.assert_allclose(again.values, expected(reference, ids[0], len(ids[0]) - 1), atol=TOLERANCE)


async def test_a_score_is_a_run_of_its_job_and_refused_where_it_does_not_fit(engine: SGLangEngine) -> None:
    def claim(**fields: Any) -> Claim:
        job = ScoreJob(reply_to="c", **fields)
        return Claim(job.id, 1, job.n, 0.0, None, encode(job))

    held = admit(claim(token_ids=PROMPT, continuations=[[1, 2], [3]]), engine.info, NoTokenizer())
    run = held.samples[1]
    asked = run.next_request(7)
    assert (asked.start, asked.token_ids.tolist(), asked.cache_key) == (len(PROMPT), [*PROMPT, 3], "7")
    leg = run.leg
    output = await engine.perform(asked)
    leg.switch(8, 0)
    run.absorb(leg, output, 0.1)
    assert run.finish_reason is None  # the weights changed under it: it runs again
    again = run.next_request(8)
    assert again.request_id != asked.request_id
    run.absorb(run.leg, await engine.perform(again), 0.1)
    assert run.result("w", engine.info).version == 8
    for fields, name in (
        ({"token_ids": [1], "continuations": [[1] * 5000]}, "5001 tokens"),
        ({"token_ids": [1], "continuations": [[100_000]]}, "token 100000"),
        ({"text": "a", "continuations": [[1]]}, "no tokenizer"),
    ):
        with pytest.raises(RequestRefused, match=name):
            admit(claim(**fields), engine.info, NoTokenizer())


async def test_an_engine_that_generates_embeds_nothing(engine: SGLangEngine) -> None:
    assert {"task:score", "tools"} <= engine.info.features
    with pytest.raises(RequestRefused, match="task='generate'"):
        await engine.perform(TaskRequest(f"{next(_number):044x}", "embed", np.array([1, 2], np.int32), "0"))
    job = GenerateJob(token_ids=[1], media=[{"kind": "image", "data": b"x"}])
    assert job.unsupported(engine.info.features) == ["media"]  # on a CPU, and with this model
