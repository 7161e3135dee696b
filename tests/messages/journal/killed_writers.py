"""Run by test_journal.py: a hundred processes that write a journal and are killed, each in a folder of its own."""

import os
import random
import signal
import struct
import sys
from pathlib import Path

from rolloutmq.messages.journal import Journal

folder = Path(sys.argv[1])
told = []
draw = random.Random(0)
for run in range(100):
    ready, tell = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(ready)
        journal = Journal(folder / str(run), segment_bytes=20_000, flush_s=0.001)
        number = 0
        while True:
            for _ in range(10):
                journal.note(f"job-{number}", number=number, text=random.randbytes(100).hex())
                number += 1
            journal.flush()
            os.write(tell, struct.pack("<q", number))
    os.close(tell)
    for _ in range(draw.randrange(1, 40)):
        flushed = struct.unpack("<q", os.read(ready, 8))[0]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while rest := os.read(ready, 8):  # what it had told by then
        flushed = struct.unpack("<q", rest)[0]
    os.close(ready)
    told.append(flushed)
(folder / "flushed").write_text(" ".join(map(str, told)))
