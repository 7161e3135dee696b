"""Every change of a pool's state as a Lua script, and the one class that runs them.

Few files: the rest of the room is Lua, in a folder for each thing that scripts are about.
"""

from .runner import Scripts, script_source

__all__ = ["Scripts", "script_source"]
