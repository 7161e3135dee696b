"""What a request carries beyond SGLang's own parameters: made in the worker, read in the scheduler's process.

It travels as one JSON text in `custom_params`, which every release passes on untouched. Each part has a module that
makes it and reads it; `extras_of` is what the scheduler's side knows of one request.
"""

from __future__ import annotations

import json
from typing import Any

KEY = "rolloutmq"
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
