"""Python's garbage collector in a process that serves.

A full collection walks every container there is. SGLang, torch and transformers make 700,000 of them, which nothing
ever frees: 0.4 to 0.5 s each time in a worker's process, every 20 to 50 s of a busy engine (measured on a CPU host), in
which it takes and gives nothing; a scheduler launches no batch meanwhile. SGLang warns of it and has a request for what
is done here (`freeze_gc`).
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Collect now, and leave what remains out of all collections to come (`gc.freeze`).

    To be called once everything that stays is there, in a process of one's own: what is let go later and hangs together
    in a cycle is not found any more.
    """
    gc.collect()
    gc.freeze()
