"""Runs scenarios, prints a line for each, writes out/chaos.json. Exit code 1 if anything was broken.

make chaos                       every scenario, another seed each time
make chaos SEED=7 ONLY=kill,net  those whose names begin like this, with the dice of seed 7
make chaos CHAOS='--shards 2'    on a pool with two shards, each on a Redis of its own
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import secrets
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from . import ledger, sabotage, scenarios
from .context import Chaos
from .oracle import Terms
from .scenario import ALL, Scenario

OUT = Path("out")


async def run(scenario: Scenario, seed: str, keep: bool, minutes: float = 0.0, shards: int = 1) -> dict[str, Any]:
    """One scenario from an empty Redis to the oracle's word. shards: of its pool, at least."""
    directory = (OUT / "chaos" / scenario.name).absolute()  # processes run elsewhere
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    began = time.monotonic()
    settings = {
        "lease_s": scenario.lease_s,
        "config": scenario.config,
        "bent": scenario.bent,
        "shards": max(scenario.shards, shards),
    }
    chaos = Chaos(scenario.name, seed, directory, **settings)
    chaos.terms = Terms(lossless=scenario.lossless)
    chaos.minutes = minutes
    timeout_s = scenario.timeout_s + (60 * minutes + 120 if scenario.lasts else 0)
    try:
        async with chaos:
            try:
                async with asyncio.timeout(timeout_s):
                    await scenario.body(chaos)
            except Exception as error:
                _note(chaos, error)
            async with asyncio.timeout(scenario.finish_s):
                await chaos.finish()
    except Exception as error:
        _note(chaos, error)
    if chaos.verdict.violations or keep:
        (directory / "violations.txt").write_text("\n".join(f"({r}) {text}" for r, text in chaos.verdict.violations))
        ledger.write(chaos.events, directory / "ledger.jsonl")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return _figures(chaos, scenario, time.monotonic() - began)


def _note(chaos: Chaos, error: Exception) -> None:
    with (chaos.directory / "error.txt").open("a") as file:
        traceback.print_exception(error, file=file)
    chaos.expect(False, f"{type(error).__name__}: {error}")


def _figures(chaos: Chaos, scenario: Scenario, seconds: float) -> dict[str, Any]:
    verdict = chaos.verdict
    kinds = [event.kind for event in chaos.events]
    return {
        "runs": 1,
        "lost": verdict.lost,
        "duplicates": verdict.duplicates,
        "fenced_published": verdict.fenced_published,
        "leaked_keys": verdict.leaked_keys,
        "recovered_s": None if chaos.recovered_s is None else round(chaos.recovered_s, 3),
        "allowed_s": chaos.budget_s,
        "lease_s": scenario.lease_s,
        "shards": len(chaos.servers),
        "struck": chaos.struck,
        "seconds": round(seconds, 2),
        "jobs": kinds.count("accept"),
        "claims": kinds.count("claim"),
        "published": kinds.count("publish"),
        "received": len(chaos.received),
        "handed_again": verdict.handed_again,
        "unlogged": verdict.unlogged,
        "with_adapter": verdict.with_adapter,
        "violations": [f"({rule}) {text}" for rule, text in verdict.violations],
    } | chaos.notes


def line(name: str, figures: dict[str, Any]) -> str:
    """What a person sees of one run."""
    word = "FAIL" if figures["violations"] else "ok  "
    recovered = "" if figures["recovered_s"] is None else f"  back after {figures['recovered_s']:.2f} s"
    if figures["recovered_s"] is not None and figures["allowed_s"] is not None:
        recovered += f" (allowed {figures['allowed_s']:g})"
    struck = f"  shard {figures['struck']} is struck" if figures["shards"] > 1 else ""
    counts = f"{figures['jobs']:5} jobs {figures['claims']:5} claims {figures['published']:6} published"
    bad = "".join(
        f"  {key}={figures[key]}" for key in ("lost", "duplicates", "fenced_published", "leaked_keys") if figures[key]
    )
    return f"{word} {name:28} {figures['seconds']:6.1f} s {counts}{struck}{recovered}{bad}"


def merge(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Figures of several runs of one scenario: counts add up, times are the worst."""
    if before is None:
        return now
    merged = before | now
    for key in ("runs", "lost", "duplicates", "fenced_published", "leaked_keys"):
        merged[key] = before[key] + now[key]
    times = [one["recovered_s"] for one in (before, now) if one["recovered_s"] is not None]
    merged["recovered_s"] = max(times, default=None)
    merged["violations"] = before["violations"] + now["violations"]
    return merged


def choose(only: str, fast: bool) -> list[Scenario]:
    """Those whose names begin with one of the comma-separated words; all without."""
    words = [word for word in only.split(",") if word]
    unknown = [word for word in words if not any(name.startswith(word) for name in ALL)]
    if unknown:
        sys.exit(f"no scenario is called {', '.join(unknown)}; there are: {', '.join(ALL)}")
    chosen = [one for one in ALL.values() if not words or any(one.name.startswith(word) for word in words)]
    return [one for one in chosen if not (fast and one.slow)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", default="", help="what every random choice follows from (default: a new one)")
    parser.add_argument("--only", default="", help="beginnings of names, comma-separated")
    parser.add_argument("--runs", type=int, default=1, help="how often each, with seeds seed, seed.1, seed.2, …")
    parser.add_argument("--fast", action="store_true", help="without those that start SGLang or take minutes")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the kill matrix goes on")
    shards = "of the pool, each on a Redis of its own; seed and name decide which of them is broken"
    parser.add_argument("--shards", type=int, default=1, choices=range(1, 5), help=shards)
    parser.add_argument("--keep", action="store_true", help="keep ledgers and logs of runs without a fault, too")
    parser.add_argument("--list", action="store_true", help="only name the scenarios")
    options = parser.parse_args()
    sabotage.adopt()
    scenarios.load()
    if options.list:
        print("\n".join(ALL))
        return 0
    base = options.seed or str(secrets.randbelow(1_000_000))
    print(f"seed {base}")
    (OUT / "chaos").mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=OUT / "chaos" / "driver.log", filemode="w")
    chosen = choose(options.only, options.fast)
    cannot = [one for one in chosen if one.one_redis and options.shards > 1]
    for scenario in cannot:
        print(f"not  {scenario.name:28} runs on one Redis only: {scenario.one_redis}")
    book: dict[str, Any] = {}
    failed: list[tuple[str, str]] = []
    began = time.monotonic()
    for again in range(options.runs):
        seed = base if again == 0 else f"{base}.{again}"
        for scenario in (one for one in chosen if one not in cannot):
            figures = asyncio.run(run(scenario, seed, options.keep, options.minutes, options.shards))
            print(line(scenario.name, figures), flush=True)
            for violation in figures["violations"][:5]:
                print(f"       {violation}")
            if figures["violations"]:
                failed.append((scenario.name, seed))
            book[scenario.name] = merge(book.get(scenario.name), figures)
    OUT.mkdir(exist_ok=True)
    (OUT / "chaos.json").write_text(json.dumps(book, indent=1) + "\n")
    shards = f" on {options.shards} shards" if options.shards > 1 else ""
    out = f"; {len(cannot)} cannot run there" if cannot else ""
    seconds = time.monotonic() - began
    print(f"{len(book)} scenarios{shards}, {seconds:.0f} s, {len(failed)} broke a promise{out}; {OUT}/chaos.json")
    for name, seed in failed:
        more = f" CHAOS='--shards {options.shards}'" if options.shards > 1 else ""
        print(f"again: make chaos SEED={seed} ONLY={name}{more}   (ledger and logs: {OUT}/chaos/{name}/)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
