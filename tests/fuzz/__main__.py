"""`python -m fuzz`: break what the decoders read, for a while. A failure prints the line that replays it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time

from fuzz.cases import CORPUS, failure, replay_line
from fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--only", default="", help=f"of {', '.join(TARGETS)}, separated by commas")
    parser.add_argument("--case", type=int, help="only this case, counted from 0")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    names = options.only.split(",") if options.only else list(TARGETS)
    print(f"fuzz: seed {options.seed}, {', '.join(names)}", flush=True)
    failed = False
    runner = asyncio.Runner()
    for name in names:
        ends, number, slowest = time.monotonic() + options.seconds / len(names), options.case or 0, (0.0, 0)
        while True:
            began = time.monotonic()
            error = runner.run(failure(name, options.seed, number))
            slowest = max(slowest, (time.monotonic() - began, number))
            if error is not None:
                failed = True
                print(f"{error}\n{name} failed; replay it with: {replay_line(name, options.seed, number)}", flush=True)
                break
            number += 1
            if options.case is not None or time.monotonic() >= ends:
                break
        print(f"fuzz: {name}: {number} cases, the slowest took {slowest[0]:.2f} s (case {slowest[1]})", flush=True)
    print(f"fuzz: the corpus is in {CORPUS}; add the case of a failure there", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
