"""Generates recorded samples again, token by token, under the weights that sampled them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...messages.errors import ConfigError, EngineDead, EngineError, WeightSyncError
from ...worker.engine import Engine
from ...worker.jobs import media
from ...worker.sglang import SGLangConfig
from ...worker.weights import folder_order
from ..flags import as_config
from ..journal import Recorded
from .parts import Part, obstacle, parts_of
from .settings import Settings, of_all
from .verdict import Verdict, compared, unverified

AT_ONCE = 256
"""Requests that are given to the engine at the same time. It runs as many of them as it has room for."""
Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
_numbers = itertools.count(1)


def replay_tokens(samples: Iterable[Recorded], settings: Settings) -> list[Verdict]:
    """The verdict on each sample, in their order, from an engine of this process. Blocks until all are generated.

    Raises ConfigError or InvalidField for settings that cannot be, and EngineError if the engine does not start.
    """
    chosen = list(samples)
    if not chosen:
        return []
    with replaying(chosen, settings) as again:
        return again(chosen)


@contextmanager
def replaying(
    samples: Sequence[Recorded], settings: Settings
) -> Iterator[Callable[[Sequence[Recorded]], list[Verdict]]]:
    """A function that generates samples again, any number of times, with one engine. Raises as `replay_tokens`.

    samples: all that there may be: they say which model and dtype the engine has.
    """
    settings = settings.for_model_of(samples)
    dtype = settings.engine.get("dtype") or of_all("dtype", samples)
    has: list[Path] = [Path(str(settings.model))]  # until the first replay
    with engine_of(settings, **({} if dtype is None else {"dtype": dtype})) as (engine, runner):
        yield lambda chosen: runner.run(regenerate(chosen, engine, settings, has=has.pop() if has else None))


@contextmanager
def engine_of(settings: Settings, **more: Any) -> Iterator[tuple[Engine, asyncio.Runner]]:
    """A started engine of this process, deterministic unless the settings say otherwise, and the loop that it runs in.

    more: settings of it, where `settings` says nothing. Raises ConfigError, InvalidField, EngineError."""
    from ...worker.sglang.engine import SGLangEngine  # noqa: PLC0415 – torch

    given = {"model": settings.model, "deterministic": True} | more | dict(settings.engine)
    engine = SGLangEngine(as_config(SGLangConfig, **given))
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            yield engine, runner
        finally:
            runner.run(engine.close())


async def regenerate(
    samples: Sequence[Recorded],
    engine: Engine,
    settings: Settings,
    *,
    has: Path | None = None,
) -> list[Verdict]:
    """The verdict on each sample, in their order. Every version is loaded once.

    engine: started, without requests. Afterwards it has other weights. has: the folder of the weights that it has now,
    if they are known.
    Raises EngineDead.
    """
    parts = [[] if obstacle(one) else parts_of(one) for one in samples]
    await engine.operate("flush_cache", {})
    places = asyncio.Semaphore(AT_ONCE)
    for version in sorted({part.version for each in parts for part in each}):
        due = [part for each in parts for part in each if part.version == version]
        try:
            path = settings.path_of(version)
            if path != has:
                await load_weights(engine, path, version)
                has = path
        except (WeightSyncError, EngineError) as error:
            if isinstance(error, EngineDead):
                raise
            for part in due:
                part.problem = str(error)
            continue
        await _load_adapters(engine, settings, due)
        await asyncio.gather(*(_generate(engine, places, part, settings) for part in due if not part.problem))
    fingerprint = engine.info.fingerprint()
    return [_verdict(*each, settings.logprob_limit, fingerprint) for each in zip(samples, parts, strict=True)]


async def load_weights(engine: Engine, path: Path, version: int) -> None:
    """Load a folder's weights. Raises WeightSyncError or EngineError; the engine then has the weights from before."""
    order = folder_order(str(path), version, _size(path))
    report = await engine.prepare_weights(order)
    if report.ok:
        report = await engine.commit_weights(order)
    if not report.ok:
        if not report.intact:
            raise EngineDead(f"{path} was loaded in part: {report.error}")
        raise WeightSyncError(f"{path} cannot be loaded: {report.error}")


def _size(path: Path) -> int:
    """Bytes of a checkpoint's tensors."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


async def _load_adapters(engine: Engine, settings: Settings, parts: Sequence[Part]) -> None:
    """Load the adapters that these parts need. A part whose adapter cannot be had gets the reason as its problem."""
    loaded = engine.info.adapters
    for name, version in sorted({(part.request.adapter, part.request.adapter_version) for part in parts}):
        if not name or loaded.has(name, version):
            continue
        try:
            from ...sync.adapters import read_adapter  # noqa: PLC0415 – torch

            adapter = await asyncio.to_thread(read_adapter, settings.adapter_path_of(name, version), name, version)
            await engine.load_adapter(adapter)
            loaded.add(name, version)
        except (WeightSyncError, ConfigError, EngineError, ValueError) as error:
            if isinstance(error, EngineDead):
                raise
            for part in parts:
                if (part.request.adapter, part.request.adapter_version) == (name, version):
                    part.problem = str(error)


async def _generate(engine: Engine, places: asyncio.Semaphore, part: Part, settings: Settings) -> None:
    """Ask for a part's tokens, and note what came."""
    job = part.run.job
    if job.media and part.start:
        part.problem = "a sample with media cannot be continued in its middle"
    elif job.media and media.must_fetch(job):
        part.problem = "its media are addresses, and a replay fetches nothing"
    if part.problem:
        return
    name = f"{part.request.request_id[:-8]}{next(_numbers) & 0xFFFFFFFF:08x}"
    try:
        async with places:
            output = await engine.generate(replace(part.request, request_id=name))
    except EngineDead:
        raise
    except EngineError as error:
        part.problem = str(error)
        return
    if output.finish_reason == "abort":
        part.problem = "the engine ended the request before it was complete"
    elif part.switched and (part.lost or output.cached_tokens < len(part.request.token_ids) - 1):
        part.doubt = "weights were switched in place under it, and the KV cache of the older weights is not there"
    elif part.switched and engine.info.device != "cpu":
        part.doubt = "weights were switched in place under it, and a GPU prefills in another way than it decodes"
    part.output = output
    settings.moved(part.end - part.start)


def _verdict(recorded: Recorded, parts: Sequence[Part], limit: float, fingerprint: Mapping[str, str]) -> Verdict:
    if reason := obstacle(recorded):
        return unverified(recorded, reason)
    count = len(recorded.result.token_ids)
    token_ids, logprobs = np.full(count, -1, np.int32), np.full(count, np.nan, np.float32)
    replayed, unproved = np.zeros(count, np.bool_), list[str]()
    for part in parts:
        if part.output is not None:
            _fill(part, recorded, token_ids, logprobs)
        why = part.problem or (part.doubt and _difference(part, recorded, token_ids, logprobs, limit))
        if why:
            unproved.append(f"tokens {part.start} to {part.end - 1}: {why}")
        else:
            replayed[part.start : part.end] = True
    last, end = parts[-1], _End()
    if last.last and replayed[-1] and (token_ids == recorded.result.token_ids)[last.start :].all():
        end = _end(recorded, last)
    found = compared(
        recorded,
        token_ids,
        logprobs,
        limit,
        replayed=replayed,
        finish=end.finish,
        differences=end.differences,
        unproved=[*unproved, *end.unproved],
        engine=fingerprint,
    )
    if found.state == "differs":
        found = replace(found, reasons=(*found.reasons, *_suspects(recorded.result.fingerprint, fingerprint)))
    return found


def _fill(part: Part, recorded: Recorded, token_ids: Ids, logprobs: Logprobs) -> None:
    """Put a part's tokens into their places, and their log-probabilities as far as the tokens are the recorded ones."""
    assert part.output is not None
    place = slice(part.start, part.end)
    got = part.output.token_ids[: part.end - part.start]
    token_ids[place][: len(got)] = got
    other = np.flatnonzero(token_ids[place] != recorded.result.token_ids[place])
    same = int(other[0]) if other.size else len(got)
    logprobs[place][:same] = part.output.logprobs[:same]


def _difference(part: Part, recorded: Recorded, token_ids: Ids, logprobs: Logprobs, limit: float) -> str:
    """A part's doubt, with how much its tokens differ; "" if they do not."""
    place, result = slice(part.start, part.end), recorded.result
    other = np.flatnonzero(token_ids[place] != result.token_ids[place])
    gap = 0.0
    if result.logprobs is not None:
        gap = float(np.nanmax(np.abs(logprobs[place] - result.logprobs[place]), initial=0.0))
    if not other.size and gap <= limit:
        return ""
    first = f"the first other token is {part.start + int(other[0])}" if other.size else "no other token"
    return f"{part.doubt}; generated without it: {first}, log-probabilities differ by up to {gap:.2g}"


class _End(NamedTuple):
    """How a replay ended, as `compared` takes it."""

    finish: str = ""
    differences: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()


def _end(recorded: Recorded, part: Part) -> _End:
    """How the replay of a sample's last part ended, all of whose tokens are the recorded ones."""
    run, result = part.run, recorded.result
    assert run.leg is not None
    assert part.output is not None
    run.absorb(run.leg, part.output, 0.0)
    if (run.finish_reason, run.kept, run.matched_stop) == (result.finish_reason, part.end, result.matched_stop):
        return _End(result.finish_reason)
    if result.finish_reason == "stop" and run.job.sampling.include_stop is not True:
        return _End(unproved=("its result does not have the stop's tokens, and newer weights may have sampled them",))
    if run.finish_reason != result.finish_reason:
        return _End(run.finish_reason or "")
    told = f"the replay has {run.kept} tokens and matched {run.matched_stop!r}, recorded is {result.matched_stop!r}"
    return _End(result.finish_reason, differences=(told,))


def _suspects(recorded: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """What may explain a difference: another engine, or one whose tokens cannot be repeated."""
    found = [
        f"it was sampled with {name} {recorded.get(name, 'unknown')!r}, and generated again with {here.get(name)!r}"
        for name in ("engine", "dtype", "device")
        if recorded.get(name) != here.get(name)
    ]
    if "deterministic" not in recorded:
        found.append("its worker was not deterministic: what a token gets depended on its batch")
    return found
