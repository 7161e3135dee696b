"""One specimen of every kind of message, with fixed values, and small makers of jobs and results."""

from __future__ import annotations

from typing import Any

import numpy as np

from rolloutmq.messages import (
    GenerateJob,
    LogitProcessor,
    LogprobOptions,
    Partial,
    RolloutResult,
    SamplingParams,
    Segment,
    TensorSpec,
    Timings,
    WeightAnnouncement,
    WeightManifest,
    WorkerStatus,
)
from rolloutmq.messages.model.base import Message
from rolloutmq.messages.model.chat import ChatMessage
from rolloutmq.messages.model.commands import Command, CommandReply
from rolloutmq.messages.model.tasks import EmbedJob, EmbedResult, RewardJob, RewardResult, ScoreJob, ScoreResult

ID = "0192f0c1a2b37c4d8e5f60718293a4b5"


_TASK: dict[str, Any] = {
    "id": ID,
    "reply_to": "c",
    "group_id": "g1",
    "priority": "high",
    "deadline_s": 60.0,
    "min_version": 2,
    "max_staleness": 1,
    "trace_id": "t",
    "metadata": {"a": 1},
}
_DONE: dict[str, Any] = {
    "job_id": ID,
    "sample": 1,
    "n": 2,
    "group_id": "g1",
    "version": 3,
    "tokens": 5,
    "worker_id": "w",
    "attempt": 2,
    "timings": Timings(queued=0.5),
    "fingerprint": {"engine": "e-1"},
    "metadata": {"k": 1},
    "trace_id": "t",
}
_HI = (ChatMessage(role="user", content="hé"),)


def specimens() -> dict[str, Message]:
    """By name; every optional field of a kind is set in at least one of them."""
    return {
        "ranked-job": GenerateJob(id=ID, reply_to="c", token_ids=[1], priority="low", engine_priority=-7),
        "job": GenerateJob(
            id=ID,
            reply_to="client-1",
            token_ids=[1, 2, 300000],
            n=4,
            sampling=SamplingParams(max_new_tokens=16, temperature=0.5, stop_token_ids=(7,), logit_bias={5: -1.5}),
            group_id="g1",
            priority="high",
            deadline_s=60.0,
            min_version=2,
            max_staleness=1,
            logprobs=LogprobOptions(sampled=False),
            seed=42,
            trace_id="t",
            metadata={"a": 1, "b": None, "c": True, "d": 0.5, "e": "x"},
        ),
        "exact-job": GenerateJob(id=ID, reply_to="c", token_ids=[1], exact_version=7),
        "exact-embed-job": EmbedJob(id=ID, reply_to="c", token_ids=([1, 2],), exact_version=7),
        "exact-reward-job": RewardJob(id=ID, reply_to="c", token_ids=([1, 2],), exact_version=7),
        "exact-score-job": ScoreJob(id=ID, reply_to="c", token_ids=[1, 2], continuations=([3],), exact_version=7),
        "chat": GenerateJob(id=ID, reply_to="c", messages=(ChatMessage(role="user", content="hé"),)),
        "result": RolloutResult(
            job_id=ID,
            sample=1,
            n=4,
            group_id="g1",
            token_ids=[5, 6, 7],
            logprobs=[-0.5, -0.25, -1.0],
            finish_reason="stop",
            matched_stop=7,
            segments=(Segment(2, 1), Segment(3, 2)),
            worker_id="w",
            attempt=2,
            prompt_ids=[1],
            text="abc",
            timings=Timings(queued=0.5, generating=1.0, waiting=0.25),
            fingerprint={"engine": "e-1"},
            metadata={"k": 1},
            trace_id="t",
        ),
        "partial": Partial(token_ids=[5], logprobs=[-0.5], segments=(Segment(2, 1),)),
        "manifest": WeightManifest(
            version=3,
            bucket_nbytes=(64,),
            tensors=(
                TensorSpec(name="a", dtype="bfloat16", shape=(2, 3), bucket=0, offset=0, nbytes=12, digest="00ff" * 4),
            ),
        ),
        "announcement": WeightAnnouncement(
            version=3,
            epoch=1,
            mode="drain",
            nonfinite="allow",
            verify=False,
            host="10.0.0.1",
            port=29500,
            token="0f" * 16,
            digest="a1" * 16,
            join_timeout_s=10.0,
            transfer_timeout_s=60.0,
        ),
        "adapter-job": GenerateJob(
            id=ID,
            text="hé",
            session_id="s",
            lora="math",
            min_adapter_version=2,
            hidden_states="last",
            logit_processors=(LogitProcessor(name="p", params={"x": 1}),),
        ),
        "wide-job": GenerateJob(
            id=ID,
            reply_to="c",
            token_ids=[1],
            sampling=SamplingParams(
                min_new_tokens=2,
                stop=("</a>", "\n\n"),
                stop_regex=("[0-9]{3}",),
                stop_token_sequences=((1, 2), (3,)),
                include_stop=False,
                json_schema="{}",
            ),
            logprobs=LogprobOptions(top=2, prompt=True, token_ids=(7, 8), kind="scaled"),
            stream=True,
            routed_experts=True,
        ),
        "wide-result": RolloutResult(
            job_id=ID,
            sample=0,
            n=1,
            group_id="g1",
            token_ids=[5, 6],
            logprobs=[-0.5, -1.0],
            logprob_kind="scaled",
            token_arrays={"top_ids": np.array([[5, 9], [6, 2]], np.int32)},
            arrays={"prompt_logprobs": np.array([np.nan, -1.5], np.float32)},
            finish_reason="stop",
            matched_stop="</a>",
            segments=(Segment(3, 2),),
            worker_id="w",
            attempt=1,
        ),
        "wide-partial": Partial(
            token_ids=[5],
            logprobs=[-0.5],
            segments=(Segment(3, 1),),
            token_arrays={"id_logprobs": np.array([[-2.0, -3.0]], np.float32)},
            arrays={"last_hidden_state": np.array([1, 2, 65535], np.uint16)},
        ),
        "adapter-result": RolloutResult(
            job_id=ID,
            sample=0,
            n=1,
            group_id="g1",
            token_ids=[5, 6, 7],
            finish_reason="length",
            segments=(Segment(3, 3),),
            adapter="math",
            adapter_version=4,
            adapter_segments=(Segment(2, 1), Segment(4, 2)),
            worker_id="w",
            attempt=1,
        ),
        "adapter-partial": Partial(
            start=3,
            token_ids=[5],
            logprobs=[-0.5],
            segments=(Segment(3, 1),),
            adapter_segments=(Segment(2, 1),),
        ),
        "adapter-announcement": WeightAnnouncement(
            version=4,
            epoch=2,
            host="10.0.0.1",
            port=29500,
            join_timeout_s=10.0,
            transfer_timeout_s=60.0,
            adapter="math",
            awaited=True,
        ),
        "status": WorkerStatus(
            worker_id="w", host="h", pid=9, state="serving", version=3, model="m", running=2, held=3, started_at=1.5
        ),
        "engine-status": WorkerStatus(
            worker_id="w",
            host="h",
            pid=9,
            state="draining",
            version=3,
            engine="sglang",
            device="gpu",
            tp_size=2,
            ep_size=2,
            max_running=8,
            generated_tokens=70000,
            finished_samples=5,
            refused_publishes=1,
            engine_restarts=4,
            features=("seed", "stream"),
        ),
        "sized-status": WorkerStatus(
            worker_id="w",
            host="h",
            pid=9,
            state="serving",
            version=3,
            pp_size=2,
            dp_size=4,
            kv_tokens=65536,
            context_length=40960,
        ),
        "busy-status": WorkerStatus(worker_id="w", host="h", pid=9, state="serving", version=3, tokens_per_s=1203.5),
        "stale-status": WorkerStatus(worker_id="w", host="h", pid=9, state="serving", version=3, staleness=(5, 0, 1)),
        "updated-status": WorkerStatus(worker_id="w", host="h", pid=9, state="serving", version=3, update_share=0.25),
        "unfinished-status": WorkerStatus(
            worker_id="w", host="h", pid=9, state="serving", version=3, unfinished_tokens=70000
        ),
        "started-status": WorkerStatus(
            worker_id="w", host="h", pid=9, state="serving", version=3, startup={"process": 1.5, "engine": 0.25}
        ),
        "blocked-status": WorkerStatus(
            worker_id="w",
            host="h",
            pid=9,
            state="paused",
            version=3,
            blocks=("pause",),
            why="pause",
            restarts_in_a_row=2,
            state_since=1.5,
        ),
        "holding-status": WorkerStatus(worker_id="w", host="h", pid=9, state="serving", version=3, hold_version=3),
        "slurm-status": WorkerStatus(worker_id="w", host="h", pid=9, state="serving", version=3, slurm_job="17.1"),
        "command": Command(id=ID, action="pause", worker_id="w", params={"mode": "abort"}, timeout_s=5.0),
        "signed-command": Command(id=ID, action="pause", timeout_s=5.0, sender="u@h"),
        "command-reply": CommandReply(id=ID, worker_id="w", ok=False, result={"x": 1}, kind="E", error="e"),
        "session-job": GenerateJob(
            id=ID, reply_to="c", text="a", context_ids=[7, 8], session_id="s", prefer_worker="w", prefer_s=1.5
        ),
        "session-result": RolloutResult(
            job_id=ID,
            sample=0,
            n=1,
            group_id="g1",
            token_ids=[],
            finish_reason="abort",
            worker_id="w",
            attempt=1,
            session_id="s",
            cached_tokens=5,
        ),
        "text-partial": Partial(token_ids=[5], logprobs=[-0.5], segments=(Segment(2, 1),), text="h"),
        "embed-job": EmbedJob(texts=("hé", "b"), dimensions=16, normalize=False, **_TASK),
        "embed-ids-job": EmbedJob(id=ID, reply_to="c", token_ids=([1, 2], [300000])),
        "embed-chat-job": EmbedJob(id=ID, reply_to="c", conversations=(_HI,)),
        "embed-result": EmbedResult(embedding=[0.5, -0.5], **_DONE),
        "reward-job": RewardJob(token_ids=([1, 2],), **_TASK),
        "reward-text-job": RewardJob(id=ID, reply_to="c", texts=("a",)),
        "reward-chat-job": RewardJob(id=ID, reply_to="c", conversations=(_HI,)),
        "reward-result": RewardResult(scores=[1.5], **_DONE),
        "score-job": ScoreJob(token_ids=[1, 2], continuations=([3], [4, 5]), **_TASK),
        "score-text-job": ScoreJob(id=ID, reply_to="c", text="a", texts=("b",)),
        "score-chat-job": ScoreJob(id=ID, reply_to="c", messages=_HI, texts=("b",)),
        "score-result": ScoreResult(logprobs=[-0.5, -1.0], token_ids=[3, 4], **_DONE),
        # new fields of GenerateJob: media, tools, tool_parser; of RolloutResult: tool_calls
        "tool-job": GenerateJob(
            id=ID,
            reply_to="c",
            messages=(
                ChatMessage(role="user", content=({"type": "text", "text": "a"}, {"type": "image"})),
                ChatMessage(role="assistant", tool_calls=({"id": "c1", "function": {"name": "f", "arguments": "{}"}},)),
                ChatMessage(role="tool", content="4", tool_call_id="c1", name="f"),
            ),
            media=({"kind": "image", "data": b"\x89PNG", "mime": "image/png"},),
            tools=({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},),
            tool_parser="xml",
        ),
        "tool-result": RolloutResult(
            job_id=ID,
            sample=0,
            n=1,
            group_id="g1",
            token_ids=[5],
            finish_reason="stop",
            segments=(Segment(3, 1),),
            worker_id="w",
            attempt=1,
            tool_calls=({"id": "call_1", "name": "f", "arguments": {"x": [1]}},),
        ),
        "lineage-result": RolloutResult(
            job_id=ID,
            sample=0,
            n=1,
            group_id="g1",
            token_ids=[5, 6, 7],
            finish_reason="stop",
            segments=(Segment(2, 1), Segment(3, 2)),
            worker_id="w",
            attempt=2,
            legs=(2,),
            in_place=(1,),
        ),
        "lineage-partial": Partial(
            start=3, token_ids=[5, 6], logprobs=[-0.5, -1.0], segments=(Segment(3, 2),), legs=(4,), in_place=(3,)
        ),
    }


def job(**fields: Any) -> GenerateJob:
    """A token job that a client called "client" waits for."""
    return GenerateJob(**({"token_ids": [1, 2, 3], "reply_to": "client"} | fields))


def result(of: GenerateJob, sample: int = 0, attempt: int = 1, worker: str = "w1", **fields: Any) -> RolloutResult:
    """A finished sample of two tokens."""
    base = {
        "job_id": of.id,
        "sample": sample,
        "n": of.n,
        "group_id": of.group,
        "token_ids": [5, 6],
        "finish_reason": "length",
        "segments": (Segment(0, 2),),
        "worker_id": worker,
        "attempt": attempt,
    }
    return RolloutResult(**(base | fields))


SHORT = SamplingParams(max_new_tokens=2)


def tokens(**fields: object) -> GenerateJob:
    """A job as a trainer makes it: the client it goes through fills in where the results go."""
    return GenerateJob(**({"token_ids": [1, 2, 3], "sampling": SHORT} | fields))
