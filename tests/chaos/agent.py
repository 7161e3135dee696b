"""An agent that knows HTTP and nothing of the pool, and what it was answered."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from .processes import GatewayProcess

PATIENCE_S = 4.0
"""So long an agent waits for a gateway to say something before it asks the other one."""
STUCK_S = 90.0
LONGEST = 300
Ids = tuple[int, ...]


class AskAgain(Exception):
    """This gateway has no answer; another one may."""


@dataclass
class Agent:
    """Asks one question after the other. gateways: those that there are now; whoever does not answer is left for the
    other one.

    turns: prompt and answer of each turn of its session. loose: turns without a key that were asked again: each may
    have been generated before, for nobody. trouble: answers that may not be. count: what it did.
    """

    name: str
    gateways: Sequence[GatewayProcess]
    rng: random.Random
    turns: list[tuple[Ids, Ids]] = field(default_factory=list)
    loose: int = 0
    trouble: list[str] = field(default_factory=list)
    count: Counter[str] = field(default_factory=Counter)

    async def go_on(self, enough: asyncio.Event) -> None:
        """Questions until it is enough. Each goes on from the one before, for a while."""
        prompt = self._ids(5)
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            while not enough.is_set():
                answer = await self._question(http, prompt)
                prompt = (*prompt, *answer, *self._ids(2)) if len(prompt) < LONGEST else self._ids(5)

    def _ids(self, count: int) -> Ids:
        return tuple(self.rng.choices(range(500), k=count))

    async def _question(self, http: httpx.AsyncClient, prompt: Ids) -> Ids:
        tokens = self.rng.choice((1, 10, 40, 100))
        stream, keyed, recorded = (self.rng.random() < share for share in (0.4, 0.4, 0.8))
        body = {"prompt": prompt, "max_tokens": tokens, "stream": stream, "return_token_ids": True}
        headers = {"idempotency-key": f"{self.name}-{self.rng.random()}"} if keyed else {}
        headers |= {"x-session-id": self.name} if recorded else {}
        answer, asked = await self._ask(http, body, headers)
        self.count.update({"asked": asked, "answered": 1, "streamed": stream, "with_key": keyed})
        if len(answer) != tokens:
            self.trouble.append(f"{self.name} asked for {tokens} tokens and got {len(answer)}")
        if recorded:
            self.turns.append((prompt, answer))
            self.loose += 0 if keyed else asked - 1
        if keyed and self.rng.random() < 0.3:
            again, _ = await self._ask(http, body, headers)
            self.count["repeated"] += 1
            if again != answer:
                self.trouble.append(f"{self.name}: two answers under the key {headers['idempotency-key']}")
        return answer

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> tuple[Ids, int]:
        """The answer, and how often it was asked for."""
        asked, place = 0, self.rng.randrange(len(self.gateways))
        async with asyncio.timeout(STUCK_S):
            while True:
                again = {"x-stainless-retry-count": str(asked)} if asked else {}
                asked += 1
                url = f"http://127.0.0.1:{self.gateways[place % len(self.gateways)].port}/v1/completions"
                try:
                    async with http.stream("POST", url, json=body, headers=headers | again) as answer:
                        return await self._read(answer), asked
                except (httpx.HTTPError, AskAgain):
                    place += 1
                    await asyncio.sleep(0.1)

    async def _read(self, answer: httpx.Response) -> Ids:
        if answer.status_code >= 500 or answer.status_code == 429:
            raise AskAgain
        if answer.status_code != 200:
            raise AssertionError(f"{self.name}: {answer.status_code} {(await answer.aread()).decode()}")
        if "json" in answer.headers["content-type"]:
            return tuple(json.loads(await answer.aread())["choices"][0]["token_ids"])
        ids, ended = list[int](), False
        async for line in answer.aiter_lines():
            if line == "data: [DONE]" and ended:
                return tuple(ids)
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise AskAgain
            (choice,) = chunk["choices"]
            ids = [*([] if choice.get("restarted") else ids), *choice["token_ids"]]
            ended = choice["finish_reason"] is not None
        raise AskAgain
