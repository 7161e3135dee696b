"""What a client's journal gets of episodes: each turn's step, with what tools answered, and how each episode ended.

A run that is repeated gets the steps from there: a tool may say something else each time that it is asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from ...messages.errors import MessageError
from ...messages.journal import Entry, Journal, read
from ...messages.model import RolloutResult
from ..data import as_error
from .environment import Step
from .episode import Episode, Turn

DEEPEST = 8
LARGEST = 1 << 16
"""Elements of an array that is written as a list."""
LONGEST = 1000
"""Of what is no plain data: characters of its `repr` that are written."""


def note_step(journal: Journal | None, name: str, episode: Episode, turn: Turn, step: Step) -> None:
    """A turn's answer was given to the environment. What the model said, and which tools it called, is in its result.

    name: the episode's.
    """
    if journal is None:
        return
    told = {"episode": name, "turn": len(episode.turns) - 1, "reward": step.reward, "done": step.done}
    if step.observation is not None:
        told["observation"] = as_plain(step.observation)
    if info := as_plain(step.info):
        told["info"] = info
    journal.note(turn.result, **told)


def recorded_step(folder: Path | str, name: str, episode: Episode) -> tuple[Any, ...] | None:
    """What the environment has said to the episode's newest turn, as a journal has it, or None.

    A turn is known by its job: its id follows from what was asked, and the tokens have to be the same. Raises what
    `messages.journal.read` raises.
    """
    result, told = episode.turns[-1].result, list[Mapping[str, Any]]()
    same = False
    for entry in read(folder, job=result.job_id, events=("result", "note")):
        if entry.event == "result":
            same = same or _is_same(entry, result)
        elif entry.data.get("episode") == name and entry.data.get("turn") == len(episode.turns) - 1:
            told.append(entry.data)
    found = next((data for data in told if "done" in data), None)
    if not same or found is None:
        return None
    return found.get("observation"), found.get("reward"), found.get("done"), found.get("info", {})


def _is_same(entry: Entry, result: RolloutResult) -> bool:
    try:
        other = entry.message
    except MessageError:
        return False
    return isinstance(other, RolloutResult) and np.array_equal(other.token_ids, result.token_ids)


def note_end(journal: Journal | None, name: str, episode: Episode) -> None:
    """An episode has ended. It is noted of its last turn; one without any has nothing in the journal but its jobs."""
    if journal is None or not episode.turns:
        return
    told = {"episode": name, "task": episode.number, "of_task": episode.sample, "turns": len(episode.turns)}
    told |= {"stop": episode.stop, "return": episode.reward}
    told |= {"error": as_plain(episode.error)} if episode.error else {}
    journal.note(episode.turns[-1].result, **told)


def as_plain(value: Any, depth: int = 0) -> Any:
    """The value as plain data: models and data classes as maps, arrays as lists, and what is unknown as text.

    What raises when it is read is written as the name of its class: a note costs no episode.
    """
    try:
        return _plain(value, depth)
    except BaseException as raised:  # classes may be of somebody's own making
        as_error(raised)  # raises Ctrl-C again
        return f"<{type(value).__name__}>"


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return value.encode(errors="replace").decode()  # it may have half a character
    if isinstance(value, bool | float | None) or (isinstance(value, int) and value.bit_length() < 64):
        return value
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    value = _opened(value) if depth < DEEPEST else value
    if isinstance(value, Mapping) and depth < DEEPEST:
        return {as_plain(str(name)): as_plain(one, depth + 1) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth < DEEPEST:
        return [as_plain(one, depth + 1) for one in value]
    return repr(value)[:LONGEST].encode(errors="replace").decode()


def _opened(value: Any) -> Any:
    """An array as a list, a model or data class as a map; others as they are."""
    if isinstance(value, np.ndarray) and value.size <= LARGEST:
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True, exclude_unset=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return value
