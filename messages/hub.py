"""One question to the Hugging Face hub: is there such a model? Its own client would try for half a minute."""

from __future__ import annotations

import importlib

HUB_S = 5.0
"""So long the hub may take to connect, and to answer, in seconds."""


def look_up(model: str) -> Exception | None:
    """Why the hub cannot be asked for a model, or what it says against it. None if it has the model, or if the hub's
    client is not installed.

    A ValueError says that no model can have such a name.
    """
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        return None
    try:
        hub.HfApi().model_info(model, timeout=HUB_S)
    except Exception as error:  # of the hub's client, or of the HTTP library that this release of it has
        return error
    return None


def is_outage(error: Exception | None) -> bool:
    """Whether `look_up` found that the hub does not answer, or has trouble of its own."""
    return error is not None and not isinstance(error, ValueError) and _status(error) >= 500


def is_unknown(error: Exception | None) -> bool:
    """Whether `look_up` found that the hub has no such model, or none for this user."""
    return error is not None and (isinstance(error, ValueError) or _status(error) in {401, 403, 404})


def _status(error: Exception) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 500))


def was_fetched(model: str, file: str) -> bool:
    """Whether this file of a model was fetched from the hub before."""
    hub = importlib.import_module("huggingface_hub")
    return isinstance(hub.try_to_load_from_cache(model, file), str)
