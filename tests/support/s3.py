"""S3 over HTTP, as a store of one's own speaks it: moto's server on a port of this host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest

BUCKET = "weights"


class Store:
    """A running server. Who has no account's keys may do nothing once `lock` is called."""

    def __init__(self, url: str, environment: pytest.MonkeyPatch) -> None:
        self.url, self._environment = url, environment
        environment.setenv("AWS_ENDPOINT_URL", url)
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        self.use("anybody", "anybody")
        self.files().mkdir(BUCKET)

    def use(self, key: str, secret: str) -> None:
        """What is opened from now on has these keys."""
        self._environment.setenv("AWS_ACCESS_KEY_ID", key)
        self._environment.setenv("AWS_SECRET_ACCESS_KEY", secret)
        fsspec.get_filesystem_class("s3").clear_instance_cache()

    def files(self) -> Any:
        """The filesystem, as it looks now: fsspec keeps listings."""
        opened = fsspec.filesystem("s3")
        opened.invalidate_cache()
        return opened

    def account(self, *actions: str) -> tuple[str, str]:
        """Keys that may do so much, s3:ListBucket and the like."""
        import boto3  # noqa: PLC0415

        iam = boto3.client("iam", endpoint_url=self.url)
        name = f"user{len(iam.list_users()['Users'])}"
        iam.create_user(UserName=name)
        statement = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=policy)
        made = iam.create_access_key(UserName=name)["AccessKey"]
        return made["AccessKeyId"], made["SecretAccessKey"]

    def lock(self, count: str = "0") -> None:
        """Check keys from now on, after `count` more requests."""
        self._ask("reset-auth", count)

    def forget(self) -> None:
        """Empty the server: what it holds lives as long as this process."""
        self.lock("inf")
        self._ask("reset")

    def _ask(self, what: str, data: str = "") -> None:
        import requests  # noqa: PLC0415

        requests.post(f"{self.url}/moto-api/{what}", data=data, timeout=30).raise_for_status()


@contextmanager
def s3_server() -> Iterator[Store]:
    """A server of the test's own with an empty bucket, and the environment that points at it."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as environment:
        host, port = server.get_host_and_port()
        store = Store(f"http://{host}:{port}", environment)
        try:
            yield store
        finally:
            store.forget()
            server.stop()
            fsspec.get_filesystem_class("s3").clear_instance_cache()
