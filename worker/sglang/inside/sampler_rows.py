"""Inside SGLang's scheduler process: the rows of a batch that told the sampler something, and what is done to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...logit_processors import LogitProcessor, Registry, Rows
from ..extras import GENERATED, KEY, extras_of
from .logits import ALL_STATES, PROCESSORS, SCALED

logger = logging.getLogger(__name__)
_ATTRIBUTE = "rolloutmq_told"


@dataclass(slots=True, eq=False)
class Told:
    """One request of SGLang's (`Req`), as long as it lives.

    prompt_len: of its sample: what earlier legs generated is a part of SGLang's prompt, and not of this.
    last: the newest tokens of the batch it was in last, and its row there. SGLang hands a token out one batch late.
    """

    prompt_len: int
    processors: list[tuple[LogitProcessor, Mapping[str, Any]]]
    scaled: bool
    req: Any  # 0.5.17: itself, which makes a cycle that the collector finds; later a weak reference
    kept: dict[int, Any] = field(default_factory=dict)
    last: tuple[torch.Tensor, int] | None = None
    failed: bool = False  # one of its processors did, which has been logged

    def prompt_ids(self) -> list[int]:
        """Of the sample."""
        return list(self.req.origin_input_ids[: self.prompt_len])

    def generated_ids(self, count: int) -> list[int]:
        """The first `count` tokens of the sample. Raises RuntimeError if SGLang has neither told nor kept one."""
        known = [*self.req.origin_input_ids[self.prompt_len :], *self.req.output_ids][:count]
        if len(known) == count - 1 and self.last is not None:
            tokens, row = self.last
            known.append(int(tokens[row]))
        if len(known) != count:
            raise RuntimeError(f"request {self.req.rid}: {len(known)} of {count} tokens are known")
        return known


def _told(req: Any, registry: Registry) -> Told:
    found: Told | None = getattr(req, _ATTRIBUTE, None)
    if found is None:
        extras = extras_of(req)
        processors = [(registry.get(name), params) for name, params in extras.get(PROCESSORS, ())]
        prompt_len = max(0, len(req.origin_input_ids) - int(extras.get(GENERATED, 0)))
        found = Told(prompt_len, processors, bool(extras.get(SCALED)), req)
        setattr(req, _ATTRIBUTE, found)
        if extras.get(ALL_STATES):
            # Asked for as "last", so that SGLang keeps no states of the prompt; collected from each forward pass.
            req.return_hidden_states = True
    return found


class _Group:
    """Rows of one batch that have the same processor at the same place in their order."""

    def __init__(self, processor: LogitProcessor, members: list[tuple[int, int, Told]], device: torch.device) -> None:
        """members: (row of the batch, place in the job's list, request)."""
        self.processor = processor
        self.members = members
        self.told = [told for _, _, told in members]
        self.places = [place for _, place, _ in members]
        self.params = [told.processors[place][1] for _, place, told in members]
        self.index = torch.tensor([row for row, _, _ in members], device=device)
        self.prompts = torch.tensor([told.prompt_len for told in self.told], device=device)
        self.shared: dict[str, Any] = {}

    def rows(self, positions: torch.Tensor) -> Rows:
        # The newest token is at `positions`; clamped for the parts of a prompt that is prefilled in chunks.
        generated = (positions[self.index] + 1 - self.prompts).clamp_(min=0)
        return Rows(self.params, generated, self.told, self.places, self.shared)

    def alone(self) -> list[_Group]:
        """Each row by itself."""
        return [_Group(self.processor, [member], self.index.device) for member in self.members]

    def log_failure(self) -> None:
        """Of its one row; once, not for every token it still has to go."""
        if not self.told[0].failed:
            self.told[0].failed = True
            logger.exception("logit processor %s failed", type(self.processor).__name__)


class Plan:
    """What is to be done to a batch, for as long as the same requests are in the same rows of it."""

    def __init__(self, members: list[tuple[int, Told]], device: torch.device) -> None:
        self.members = members
        self.scaled = _index([row for row, told in members if told.scaled], device)
        guarded = [row for row, told in members if told.processors]
        self.guarded = _index(guarded, device)
        self.groups: list[_Group] = []
        for place in range(max((len(told.processors) for _, told in members), default=0)):
            stage: dict[LogitProcessor, list[tuple[int, int, Told]]] = {}
            for row, told in members:
                if place < len(told.processors):
                    stage.setdefault(told.processors[place][0], []).append((row, place, told))
            self.groups += [_Group(processor, found, device) for processor, found in stage.items()]

    def temperatures(self, given: torch.Tensor, positions: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
        """(batch, 1): `given` with those that processors set in their place. `lost` as in `change`."""
        waiting = [g for g in self.groups if type(g.processor).temperature is not LogitProcessor.temperature]
        while waiting:
            group = waiting.pop(0)
            try:
                found = group.processor.temperature(group.rows(positions))
            except Exception:
                if len(group.members) > 1:  # whose fault it is shows when each is asked by itself
                    waiting[:0] = group.alone()
                    continue
                group.log_failure()
                found = given.new_full((1,), float("nan"))
            if found is not None:
                bad = ~((found > 0) & torch.isfinite(found))
                lost[group.index] |= bad
                given = given.index_copy(0, group.index, found.masked_fill(bad, 1.0).to(given)[:, None])
        return given

    def change(self, logits: torch.Tensor, positions: torch.Tensor, lost: torch.Tensor) -> None:
        """Run the processors on `logits` (batch, vocabulary), in place.

        lost: (batch,) bool, set where a row has no token left or its processor failed. Such a row gets a uniform
        distribution, because SGLang's sampler ends the whole engine over one that is none.
        """
        waiting = [g for g in self.groups if type(g.processor).__call__ is not LogitProcessor.__call__]
        while waiting:
            group = waiting.pop(0)
            selected = logits.index_select(0, group.index)
            try:
                group.processor(selected, group.rows(positions))
            except Exception:
                if len(group.members) > 1:
                    waiting[:0] = group.alone()
                    continue
                group.log_failure()
                selected.fill_(float("nan"))
            logits.index_copy_(0, group.index, selected)
        if self.guarded is not None:
            selected = logits.index_select(0, self.guarded)
            lost[self.guarded] |= ~torch.isfinite(selected.amax(-1))  # which is nan if there is one
            logits.index_copy_(0, self.guarded, selected.masked_fill_(lost[self.guarded][:, None], 0.0))

    def sampled(self, tokens: torch.Tensor) -> None:
        """These are the batch's next tokens."""
        for row, told in self.members:
            told.last = tokens, row


class Planner:
    """The plan of each batch; the same one as long as it fits."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._plan: Plan | None = None

    def forget(self) -> None:
        """No request of the last plan is there any more."""
        self._plan = None

    def plan(self, params: list[dict[str, Any] | None], device: torch.device) -> Plan:
        """params: of each row, SGLang's custom parameters, in which it puts the request itself."""
        members = [
            (row, _told(each["__req__"], self._registry))
            for row, each in enumerate(params)
            if each is not None and KEY in each and "__req__" in each
        ]
        if self._plan is None or self._plan.members != members:
            self._plan = Plan(members, device)
        return self._plan


def _index(rows: list[int], device: torch.device) -> torch.Tensor | None:
    return torch.tensor(rows, device=device) if rows else None
