"""A session's tokens: a tree of requests, each continuing another one. Pure; it is the client that remembers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...messages.errors import InvalidField


@dataclass(slots=True)
class Turn:
    """One request that was answered.

    prompt: ids of all that came before what it generated, `output`. parent: the request it continues, None for a first
    turn. versions: of the weights that sampled it. worker_id: who has the prefix in its cache.
    """

    rid: str
    prompt: list[int]
    output: list[int]
    parent: str | None
    worker_id: str = ""
    versions: tuple[int, ...] = ()
    children: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Base:
    """What a request continues: the tokens before its own, the turn they are of, and the worker to prefer."""

    tokens: list[int]
    parent: str | None = None
    worker_id: str = ""


class History:
    """Of one session. capacity: how long in characters it was said to become; nothing depends on it.

    root: tokens that every first turn continues: of a fork, what it was forked from.
    """

    def __init__(self, session_id: str, capacity: int, root: Sequence[int] = (), worker_id: str = "") -> None:
        self.session_id, self.capacity = session_id, capacity
        self.root, self._root_worker = list(root), worker_id
        self.turns: dict[str, Turn] = {}

    def base(
        self, rid: str | None, offset: int | None = None, replace: bool = False, drop_previous_output: bool = False
    ) -> Base:
        """What a request with these parameters continues; forgets what `replace` says.

        rid: the request to continue, None to begin anew. offset: -1 or None: behind all of it; 0 or more: behind so
        many of its tokens. replace: what continued that request before is forgotten (without rid: everything is).
        drop_previous_output: without what that request generated. Raises InvalidField.
        """
        if rid is None:
            if offset not in (None, -1) or drop_previous_output:
                raise InvalidField(
                    "rid", rid, "a request of this session, together with offset or drop_previous_output"
                )
            if replace:
                self.turns.clear()
            return Base(list(self.root), None, self._root_worker)
        turn = self.turn(rid)
        tokens = turn.prompt if drop_previous_output else turn.prompt + turn.output
        if offset is not None and offset != -1:
            if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= len(tokens):
                raise InvalidField("offset", offset, f"-1, or from 0 to {len(tokens)}, the tokens of request {rid}")
            tokens = tokens[:offset]
        if replace:
            for child in turn.children:
                self._forget(child)
            turn.children = []
        return Base(list(tokens), rid, turn.worker_id)

    def turn(self, rid: str) -> Turn:
        """A request that was answered. Raises InvalidField."""
        if rid not in self.turns:
            raise InvalidField("rid", rid, f"one that session {self.session_id!r} has answered and not replaced")
        return self.turns[rid]

    def add(self, turn: Turn) -> None:
        """A request was answered. One whose parent was replaced meanwhile is kept, as a turn without a parent."""
        parent = self.turns.get(turn.parent or "")
        if parent is not None:
            parent.children.append(turn.rid)
        else:
            turn.parent = None
        self.turns[turn.rid] = turn

    def newest(self) -> Turn | None:
        """The turn that was answered last."""
        return next(reversed(self.turns.values()), None)

    def fork(self, session_id: str, offset: int = -1) -> History:
        """A session of its own with all that this one has, request ids included.

        offset: -1 for that; 0 or more: it has no requests, and begins behind so many tokens of the newest one here.
        Raises InvalidField.
        """
        newest = self.newest()
        if offset != -1:
            base = self.base(newest.rid if newest else None, offset if newest else None)
            if newest is None and offset > len(base.tokens):
                raise InvalidField("offset", offset, f"-1, or from 0 to {len(base.tokens)}")
            return History(session_id, self.capacity, base.tokens[:offset], base.worker_id)
        forked = History(session_id, self.capacity, self.root, self._root_worker)
        for rid, turn in self.turns.items():
            forked.turns[rid] = Turn(
                rid, turn.prompt, turn.output, turn.parent, turn.worker_id, turn.versions, list(turn.children)
            )
        return forked

    def info(self) -> dict[str, Any]:
        """For people, and for code that looks for a request to continue; plain data."""
        turns = [
            {
                "rid": turn.rid,
                "parent": turn.parent,
                "children": list(turn.children),
                "prompt_tokens": len(turn.prompt),
                "output_tokens": len(turn.output),
                "worker_id": turn.worker_id,
                "weight_versions": [str(version) for version in turn.versions],
            }
            for turn in self.turns.values()
        ]
        newest = self.newest()
        return {
            "session_id": self.session_id,
            "capacity_of_str_len": self.capacity,
            "tokens": len(newest.prompt) + len(newest.output) if newest else len(self.root),
            "requests": turns,
        }

    def _forget(self, rid: str) -> None:
        turn = self.turns.pop(rid, None)
        for child in turn.children if turn is not None else ():
            self._forget(child)
