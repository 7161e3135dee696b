"""Tells Kubernetes which worker's pod costs least to delete: the one whose unfinished samples have the fewest tokens.

Of a Deployment that shrinks, Kubernetes deletes the pods with the lowest `pod-deletion-cost` first. The exporter says
these costs, so that no worker needs any right in the cluster.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...messages.errors import ConfigError
from ...messages.model import WorkerStatus

log = logging.getLogger(__name__)
EVERY_S = 30.0
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
POD_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
HIGHEST = 1 << 30
PATIENCE_S = 5.0


class PodPatches:
    """Patches pods of this pod's own namespace, with the rights of its service account.

    Raises ConfigError outside of a cluster, and in a pod without a service account's token.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> None:
        self._host = environment.get("KUBERNETES_SERVICE_HOST", "")
        self._port = int(environment.get("KUBERNETES_SERVICE_PORT", "443"))
        self._token = account / "token"
        try:
            self._namespace = (account / "namespace").read_text().strip()
            self._tls = ssl.create_default_context(cafile=account / "ca.crt")
        except OSError as error:
            raise ConfigError(f"--deletion-costs needs a pod with a service account's token: {error}") from None
        if not self._host:
            raise ConfigError("--deletion-costs needs a pod: KUBERNETES_SERVICE_HOST is not set")

    def annotate(self, pod: str, name: str, value: str) -> int:
        """Set an annotation. Returns the status of Kubernetes' answer. Raises OSError or HTTPException without one."""
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=PATIENCE_S, context=self._tls)
        try:
            connection.request(
                "PATCH",
                f"/api/v1/namespaces/{self._namespace}/pods/{pod}",
                json.dumps({"metadata": {"annotations": {name: value}}}),
                {
                    "Content-Type": "application/merge-patch+json",
                    "Authorization": f"Bearer {self._token.read_text().strip()}",  # read each time: it is replaced
                },
            )
            return connection.getresponse().status
        finally:
            connection.close()


def deletion_cost(worker: WorkerStatus) -> int:
    """Tokens of the worker's unfinished samples, rounded down to a power of two; 0 for none.

    Rounded, because each change is a write to the cluster's own database.
    """
    return min(1 << worker.unfinished_tokens.bit_length() >> 1, HIGHEST)


class DeletionCosts:
    """Keeps the costs of a pool's pods up to date. A worker's host is its pod's name."""

    def __init__(self, pods: PodPatches) -> None:
        self._pods = pods
        self._told: dict[str, int] = {}
        self._complained = ""

    def tell(self, workers: Iterable[WorkerStatus]) -> None:
        """Say the costs that have changed. After an error the rest waits for the next call."""
        costs = {worker.host: deletion_cost(worker) for worker in workers if POD_NAME.fullmatch(worker.host)}
        self._told = {pod: cost for pod, cost in self._told.items() if pod in costs}
        for pod, cost in costs.items():
            if self._told.get(pod) == cost:
                continue
            try:
                status = self._pods.annotate(pod, ANNOTATION, str(cost))
            except (OSError, http.client.HTTPException) as error:
                return self._complain(f"Kubernetes does not answer: {error}")
            if status not in {200, 404}:  # 404: it is gone, or it was no pod
                return self._complain(f"Kubernetes refuses: status {status} for pod {pod}")
            self._told[pod] = cost
        self._complained = ""
        return None

    def _complain(self, text: str) -> None:
        if text != self._complained:
            log.warning("the costs of deleting pods were not said: %s", text)
        self._complained = text
