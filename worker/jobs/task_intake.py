"""From a job that generates nothing to its runs: tokenised, and checked against what the engine can take."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.broker import Claim
from ...messages.errors import RequestRefused
from ...messages.model import PoolingJob, ScoreJob, TaskJob
from ..engine import EngineInfo
from ..text import Tokenizer
from .task import TaskRun

Ids = npt.NDArray[np.int32]


def task_runs(job: TaskJob, claim: Claim, info: EngineInfo, tokenizer: Tokenizer | None) -> dict[int, TaskRun]:
    """A run for each input that is not published yet, by its number.

    tokenizer: None only for a job for which `needs_tokenizer` is False. Raises RequestRefused.
    """
    if missing := job.unsupported(info.features):
        has = ", ".join(sorted(name for name in info.features if name.startswith("task:"))) or "no task but generate"
        raise RequestRefused(f"{', '.join(missing)}: not on this worker, whose {info.name} {info.version} has {has}")
    runs: dict[int, TaskRun] = {}
    for index, (ids, start) in enumerate(_inputs(job, tokenizer)):
        if index in claim.published:
            continue
        if len(ids) > info.context_length:
            raise RequestRefused(f"input {index} has {len(ids)} tokens: at most {info.context_length} fit this engine")
        if (worst := int(ids.max())) >= info.vocab_size:
            raise RequestRefused(f"input {index} has token {worst}: ids of this model are 0 to {info.vocab_size - 1}")
        runs[index] = TaskRun(job, ids, index, claim.attempt, claim.queued_s, start)
    return runs


def needs_tokenizer(job: TaskJob) -> bool:
    """Whether something of it is not ids yet."""
    if isinstance(job, ScoreJob):
        return job.token_ids is None or job.continuations is None
    assert isinstance(job, PoolingJob)
    return job.token_ids is None


def _inputs(job: TaskJob, tokenizer: Any) -> list[tuple[Ids, int]]:
    """Each input's ids, and where what is asked about begins."""
    if isinstance(job, ScoreJob):
        prompt = _prompt(job, tokenizer)
        parts = job.continuations or tuple(tokenizer.encode(text, special=False) for text in job.texts or ())
        return [(np.concatenate([prompt, ids]), len(prompt)) for ids in parts]
    assert isinstance(job, PoolingJob)
    if job.token_ids is not None:
        return [(ids, 1) for ids in job.token_ids]
    if job.texts is not None:
        return [(tokenizer.encode(text), 1) for text in job.texts]
    return [
        (tokenizer.encode_chat([message.rendered() for message in chat], answer=False), 1)
        for chat in job.conversations or ()
    ]


def _prompt(job: ScoreJob, tokenizer: Any) -> Ids:
    if job.token_ids is not None:
        return job.token_ids
    if job.text is not None:
        return np.asarray(tokenizer.encode(job.text), dtype=np.int32)
    ids: Ids = tokenizer.encode_chat([message.rendered() for message in job.messages or ()])
    return ids
