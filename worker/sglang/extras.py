"""What a request carries beyond SGLang's own parameters: made in the worker, read in the scheduler's process.

It travels as one JSON text in `custom_params`, which every release passes on untouched. Each part has a module that
makes it and reads it; sglang_params.py brings them together. `extras_of` is what the scheduler's side knows of one
request.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

KEY = "rolloutmq"
GENERATED = "generated"
"""Among all extras: how many tokens at the end of the prompt are no prompt, see EngineRequest.generated."""
_ATTRIBUTE = "rolloutmq_extras"


def pack(extras: dict[str, Any]) -> dict[str, str] | None:
    """`custom_params` for `extras`, or None for none: such a request costs nothing more than SGLang's own."""
    return {KEY: json.dumps(extras)} if extras else None


def extras_of(request: Any) -> dict[str, Any]:
    """The extras of a request of SGLang's scheduler (`Req`), unpacked once."""
    found: dict[str, Any] | None = getattr(request, _ATTRIBUTE, None)
    if found is None:
        text = (request.sampling_params.custom_params or {}).get(KEY)
        found = json.loads(text) if text else {}
        setattr(request, _ATTRIBUTE, found)
    return found


def generated_before(request: Any) -> list[int]:
    """Tokens at the end of its prompt that earlier legs of the sample generated."""
    count = int(extras_of(request).get(GENERATED, 0))
    prompt = request.origin_input_ids
    return list(prompt[-count:]) if 0 < count < len(prompt) else []  # one that SGLang gave up on has lost its prompt


def abort(message: str) -> Any:
    """What `Req.to_finish` takes to end a running request as one that is refused. Imports SGLang."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415  (only in a scheduler process)

    return FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")
