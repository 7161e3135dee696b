"""What the two halves of an SGLang engine send each other: questions, names of fields, and where the socket is.

The worker's process has one half. Each scheduler process has the other, in `inside/`. They talk in three ways.

**Extras.** A request can carry more than SGLang's own parameters. They travel as one JSON text in `custom_params`,
which every release of SGLang passes on unchanged.

**Questions** to a scheduler process, on a unix socket in a folder that only this user can enter. A question is a line
of JSON, its answer one line back, before the next question of that connection:

    {"prepare": <TransferOrder>}   the report of the first half of a transfer, when it is over
    {"committed": <ticket>, "timeout_s": s}
                                   the report of the second half, which SGLang's own request with that ticket sets off
    {"commit": <ticket>, "loader": <name>, "told": <text>, "timeout_s": s}
                                   that report, of a commit that this question sets off: for an engine of one rank that
                                   has no requests
    {"operate": {"operation": <name>, …}}
                                   {"ok": true, "result": {…}} or {"ok": false, "kind": …, "error": …}

**Loaders.** SGLang calls a function of this package by its dotted name, with the model, between two batches.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from ...sync.transfer import TransferReport

COMMIT_LOADER = "rolloutmq.worker.sglang.inside.control.commit"
"""Loads a version that `prepare` has received. Its text is JSON: {"epoch", "mode", "version", "ticket"}."""
HEAD_LOADER = "rolloutmq.worker.sglang.inside.control.clear_bias"
"""Sets the bias of a layer to zero. Its text is the layer's name."""

LINE_LIMIT = 1 << 26
"""Bytes of a question or an answer."""

KEY = "rolloutmq"
"""The extras' name in `custom_params`. All names below are fields of the extras."""
GENERATED = "generated"
"""Number of tokens at the end of the prompt that earlier legs generated; see EngineRequest.generated. In all extras."""
PROCESSORS, SCALED, ALL_STATES = "processors", "scaled", "all_states"
"""[[name, params], ...] in the job's order. Whether logprobs are after temperature.

Whether each token has a hidden state.
"""
STOPS, LEAST, PENALISED = "stops", "least", "penalised"
"""[texts, regexes, sequences, tokens]. The sample's min_new_tokens. Whether earlier tokens count for penalties."""
GRAMMAR = "grammar"
"""Whether the request continues a sample that has a grammar."""
STREAM = "stream"
"""Whether the scheduler reports each token of the request."""

STOP_TOKENS, STOP_TEXT = "rolloutmq_tokens", "rolloutmq_text"
"""Fields of SGLang's finish reason: how many tokens have a part of the matched stop; the text from where it begins."""
_UNPACKED = "rolloutmq_extras"


def socket_path(folder: str, rank: int) -> str:
    """Return the path of the socket on which the scheduler of tensor-parallel rank `rank` listens."""
    return str(Path(folder) / f"rank{rank}")


def adapter_name(name: str, version: int) -> str:
    """Return SGLang's name of one version of an adapter."""
    return f"{name}@{version}"


def pack(extras: dict[str, Any]) -> dict[str, str] | None:
    """Return `custom_params` for `extras`, or None if there are none.

    Then a request costs no more than SGLang's own.
    """
    return {KEY: json.dumps(extras)} if extras else None


def extras_of(request: Any) -> dict[str, Any]:
    """Return the extras of a request of SGLang's scheduler (`Req`). They are decoded once."""
    found: dict[str, Any] | None = getattr(request, _UNPACKED, None)
    if found is None:
        text = (request.sampling_params.custom_params or {}).get(KEY)
        found = json.loads(text) if text else {}
        setattr(request, _UNPACKED, found)
    return found


def generated_before(request: Any) -> list[int]:
    """Return the tokens at the end of a `Req`'s prompt that earlier legs of its sample generated."""
    count = int(extras_of(request).get(GENERATED, 0))
    prompt = request.origin_input_ids
    return list(prompt[-count:]) if 0 < count < len(prompt) else []  # SGLang may drop the prompt of one that it gave up


def refused(why: str, *told: TransferReport) -> TransferReport:
    """Return the report of an update that SGLang refused. told: reports of loaders that had begun anyway."""
    touched = any(report.ok or not report.intact for report in told)
    return TransferReport(ok=False, phase="load", error=f"SGLang refused the update: {why}", intact=not touched)


def sglang_request(kind: str, **fields: Any) -> Any:
    """Make one of SGLang's own request objects. kind: name of its class in `sglang.srt.managers.io_struct`."""
    from sglang.srt.managers import io_struct  # noqa: PLC0415 – loaded by the engine's start

    return getattr(io_struct, kind)(**fields)


def loader_request(loader: str, text: str, tp_size: int) -> Any:
    """Make SGLang's request to call `loader(model, [(text, tensor)])` on every tensor-parallel rank.

    loader: "module.function", one of the engine's `custom_weight_loader`. The tensor's one element is the rank.
    """
    import torch  # noqa: PLC0415

    # Pickled by value: the usual way shares the tensor through a file descriptor that this process must keep open.
    payloads = [pickle.dumps([(text, torch.tensor([rank]))]) for rank in range(tp_size)]
    return sglang_request(
        "UpdateWeightsFromTensorReqInput",
        serialized_named_tensors=payloads,  # each rank unpacks its own
        load_format=loader,
        flush_cache=False,  # a refused flush would end the scheduler, and `extra_key` keeps versions apart
    )
