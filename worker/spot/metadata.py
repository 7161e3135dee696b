"""Questions to a cloud's metadata service, each with an end: in time and in size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

ENDPOINT = "http://169.254.169.254"
"""The address at which AWS, GCP and Azure answer."""
TIMEOUT_S = 10.0
MOST_BYTES = 1 << 16
"""More of an answer is not read; no answer that is looked for comes near it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """status: of HTTP. body: its text. headers: by their names in small letters."""

    status: int
    body: str
    headers: dict[str, str]

    def json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise ValueError(f"no JSON: {self.body[:80]!r}") from None


class Metadata:
    """A metadata service. Use it as an `async with` block. It follows no redirect and uses no proxy."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = (endpoint or ENDPOINT).rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Metadata:
        import aiohttp  # noqa: PLC0415 – SGLang brings it, and only workers on spot machines need it here

        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(
        self,
        path: str,
        headers: dict[str, str],
        *,
        method: str = "GET",
        accept: tuple[int, ...] = (200,),
        wait_s: float = 0.0,
    ) -> Answer:
        """One question. wait_s: how long the service may take beyond TIMEOUT_S.

        Raises TimeoutError, OSError (also for a status that is not in `accept`) or ValueError.
        """
        import aiohttp  # noqa: PLC0415

        assert self._session is not None
        limit = aiohttp.ClientTimeout(total=TIMEOUT_S + wait_s)
        url = f"{self._endpoint}{path}"
        async with self._session.request(method, url, headers=headers, timeout=limit, allow_redirects=False) as answer:
            if answer.status not in accept:
                raise OSError(f"{method} {url.partition('?')[0]} answers {answer.status}")
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise ValueError(f"{method} {url.partition('?')[0]} answers more than {MOST_BYTES} bytes")
            told = {name.lower(): value for name, value in answer.headers.items()}
            return Answer(answer.status, body.decode(errors="replace"), told)
