"""AWS: the interruption notice of a spot instance, two minutes before it ends, by IMDSv2."""

from __future__ import annotations

from .metadata import Metadata

TOKEN = "/latest/api/token"
ACTION = "/latest/meta-data/spot/instance-action"
TOKEN_TTL_S = 21600
ACTIONS = ("terminate", "stop", "hibernate")


class AwsNotices:
    """Spot interruption notices. A rebalance recommendation is not one: most machines that get it stay."""

    pause_s = 5.0

    def __init__(self) -> None:
        self._token = ""

    async def look(self, metadata: Metadata) -> str:
        """See Notices."""
        token, self._token = self._token or await self._new_token(metadata), ""
        answer = await metadata.ask(ACTION, {"X-aws-ec2-metadata-token": token}, accept=(200, 401, 404))
        if answer.status == 401:  # it has expired
            token = await self._new_token(metadata)
            answer = await metadata.ask(ACTION, {"X-aws-ec2-metadata-token": token}, accept=(200, 404))
        self._token = token  # one that makes trouble is not kept
        if answer.status == 404:
            return ""
        told = answer.json()
        action = told.get("action") if isinstance(told, dict) else None
        if action not in ACTIONS:
            raise ValueError(f"spot/instance-action says {answer.body[:80]!r}")
        return f"{action} at {str(told.get('time'))[:40]!r}"

    async def _new_token(self, metadata: Metadata) -> str:
        wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        return (await metadata.ask(TOKEN, wanted, method="PUT")).body.strip()
