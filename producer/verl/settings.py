"""What a pool needs to know beside verl's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...messages.model import as_invalid_field

NAME = "rolloutmq"
"""Of the rollout, of its checkpoint engine, and of their part of verl's `engine_kwargs`."""


class PoolSettings(BaseModel):
    """`actor_rollout_ref.rollout.engine_kwargs.rolloutmq`; nothing in it has to be given.

    redis_url: the pool's Redis; by default $ROLLOUTMQ_REDIS, or the one on the host of each process.
    pool: its name.
    max_staleness: how many versions a worker may be behind the newest committed one when a request starts there.
    prefer_s: how long a turn waits for the worker that has its prefix in its cache, in seconds, while that one is full.
    commit_timeout_s: the longest wait for a version to be committed, in seconds.
    publisher: fields of `SyncSettings`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    redis_url: str | None = Field(default=None, repr=False)
    pool: str = "default"
    max_staleness: int = Field(default=0, ge=0)
    prefer_s: float = Field(default=30.0, gt=0, le=60.0)
    commit_timeout_s: float = Field(default=600.0, gt=0)
    publisher: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(cls, engine_kwargs: Mapping[str, Any] | None) -> Self:
        """Read them from verl's `engine_kwargs`. Raises InvalidField for an unknown name or a wrong value."""
        given = (engine_kwargs or {}).get(NAME) or {}
        try:
            return cls(**{str(name): value for name, value in given.items()})
        except ValidationError as error:
            raise as_invalid_field(error) from None
