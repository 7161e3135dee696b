"""Which of the trainer's steps a version is from: told to the servers of all replicas. Needs Ray, and not verl.

Ray may import any module of this room first. If that one imports verl, verl imports `plugin` and `checkpoint` before it
goes on. So these two import no other module of the room that imports verl.
"""

from __future__ import annotations

import asyncio

import ray

from .settings import NAME

ACTOR = f"{NAME}_server_"
"""What the Ray names of all servers begin with."""


async def tell_servers(version: int, global_steps: int | None) -> None:
    """Tell the servers of all replicas in this Ray namespace which step a version is from."""
    names = [name for name in ray.util.list_named_actors() if name.startswith(ACTOR)]
    await asyncio.gather(*(ray.get_actor(name).set_global_steps.remote(version, global_steps) for name in names))
