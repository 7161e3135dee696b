"""Every change of a pool's state as a Lua script, and the one class that runs them."""

from .runner import Scripts, script_source

__all__ = ["Scripts", "script_source"]
