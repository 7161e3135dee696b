"""New weights while requests run, in SGLang's scheduler process: counts the tokens that the old weights sampled.

SGLang's scheduler takes in requests, weight updates among them, between two batches. With overlap scheduling it has
then launched the newest batch, whose tokens the requests do not know yet: they are in `result_queue`. It hands them out
after it has launched the next batch, the first under new weights. So the number of a request's older tokens is known
only when everything that was in that queue has been processed.

What SGLang keeps of a request decides under which key its prefixes are cached (`extra_key`; this package puts the
weights version there). Seen in 0.5.17 and 0.5.23:

- A request that holds KV (running, or in the middle of a chunked prefill) shares nodes of the prefix tree under its
  key. It keeps the key, so that a request of a newer version can never find what it adds to the tree.
- A request that waits holds none. Its prefix (`calc_priority`) is matched again under its new key before it runs
  (`init_next_round_input`).
- A request that was retracted has lost its KV and is prefilled as a new one, all under the new weights. With its old
  key it could find prefixes of the old ones again, so it gets the new key too. Its tokens stay.

A result says of each token whether its cache was computed anew or goes on across a switch. So those that hold no KV are
reported too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ....messages.errors import WeightSyncError

ELSEWHERE = {
    "pp_size": (None, 1),
    "dp_size": (None, 1),
    "disaggregation_mode": (None, "null"),
    "enable_pdmux": (None, False),
    "speculative_algorithm": (None,),
    "dllm_algorithm": (None,),
    "enable_hisparse": (None, False),
    "enable_hierarchical_cache": (None, False),
    "enable_lmcache": (None, False),
    "enable_flexkv": (None, False),
    "enable_unified_cache_external_linker": (None, False),
}
"""Server argument -> values without effect. With others, requests, results or prefixes are where this module does not
look."""
OnCounts = Callable[[dict[str, int], list[str]], None]


@dataclass(slots=True)
class _Report:
    """The report on one switch. It is sent when `left` more batches have been processed.

    anew: ids of the requests that held no KV at the switch.
    """

    left: int
    requests: list[Any]
    anew: list[str]
    tell: OnCounts

    def send(self) -> None:
        self.tell({request.rid: len(request.output_ids) for request in self.requests}, self.anew)


@dataclass(slots=True)
class Switches:
    """One scheduler's switches so far.

    key: the key that new requests with a retired key get instead, None before the first switch. retired: keys of older
    weights. seen: keys of requests since the last switch.
    """

    key: str | None = None
    retired: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    reports: list[_Report] = field(default_factory=list)

    def admit(self, request: Any) -> None:
        """Give a request that is about to wait, new or retracted, a key that is not of older weights."""
        adapter = request.lora_id or ""  # SGLang appends it to the key
        key = (request.extra_key or "").removesuffix(adapter)
        if self.key is not None and key in self.retired and not _holds_kv(request):
            key, request.extra_key = self.key, self.key + adapter
        self.seen.add(key)

    def processed(self) -> None:
        """Note that the results of one more batch have been handed out."""
        for report in self.reports:
            report.left -= 1
        while self.reports and self.reports[0].left <= 0:
            self.reports.pop(0).send()


def check(scheduler: Any, new_key: str) -> None:
    """Check, before anything is written, that a `switch` to `new_key` would work.

    Raises WeightSyncError if SGLang is configured to keep requests or prefixes where `switch` does not look, if it is
    paused, or if prefixes of other weights may be cached under `new_key`.
    """
    arguments = scheduler.server_args
    for name, values in ELSEWHERE.items():
        if (value := getattr(arguments, name, None)) not in values:
            raise WeightSyncError(f"weights cannot be updated in place with {name}={value!r}")
    if getattr(scheduler, "_engine_paused", False):
        raise WeightSyncError("weights cannot be updated in place while SGLang is paused")
    switches: Switches = scheduler.rolloutmq_switches
    if new_key in switches.retired | switches.seen:
        raise WeightSyncError(f"weights cannot be updated in place: requests have run as version {new_key} before")


def switch(scheduler: Any, new_key: str, on_counts: OnCounts) -> None:
    """Keep requests and prefixes of the old and the new weights apart, once the weights have been replaced.

    Call it from the weight loader, on the scheduler's main thread, on every tensor-parallel rank, when the last weight
    is written. Do not call it after a failure, because then the old weights' keys must stay. Before its first write the
    loader waits for the device, because with overlap scheduling the newest batch may still run.

    on_counts({request id: tokens}, anew): number of output tokens that the old weights sampled, for every request that
    had not ended before, and the ids of those of which there is no KV. It is called once, on the main thread, in this
    call or (with overlap scheduling) one batch later. It must not raise and should not block. A request may have ended
    meanwhile with fewer tokens than reported.
    """
    switches: Switches = scheduler.rolloutmq_switches
    switches.retired |= switches.seen - {new_key}
    switches.key, switches.seen = new_key, {new_key}
    for request in scheduler.waiting_queue:
        switches.admit(request)
    pending = len(getattr(scheduler, "result_queue", ()))
    requests = list({request.rid: request for request in _live(scheduler)}.values())
    report = _Report(pending, requests, [one.rid for one in requests if not _holds_kv(one)], on_counts)
    if pending:
        switches.reports.append(report)
    else:
        report.send()


def _live(scheduler: Any) -> Iterator[Any]:
    """Yield every request that may have tokens of the old weights, some of them more than once."""
    batches = [scheduler.running_batch, scheduler.last_batch]
    batches += [batch for batch, *_ in getattr(scheduler, "result_queue", ())]
    for batch in batches:
        if batch is not None:
            yield from batch.reqs
    yield from scheduler.waiting_queue
    yield from getattr(getattr(scheduler, "grammar_manager", None), "grammar_queue", ())
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


def _holds_kv(request: Any) -> bool:
    # 0.5.17 has None if there is no KV. Later releases have an object that tells.
    return request.kv is not None and bool(getattr(request.kv, "holds_kv", True))
