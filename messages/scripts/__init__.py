"""Every change of a pool's state as a Lua script, each with a typed call, and the one class that runs them."""

from . import calls
from .runner import Scripts
from .source import script_names, script_source

__all__ = ["Scripts", "calls", "script_names", "script_source"]
