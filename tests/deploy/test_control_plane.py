"""A real API server takes deploy/example with all components; controllers make the pods, and the scheduler places them.

The nodes are objects without a kubelet, so no container runs. ROLLOUTMQ_CONTROL_PLANE is the folder of the programs;
control_plane.sh builds them. They are 1.20, from before policy/v1 and indexed Jobs: `older` says what is left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.manifests import Object, needs_kubectl, rendered
from support.redis.deployments import free_port, soon

from rolloutmq.ops.redis import embedded, parent_bound

FOLDER = os.environ.get("ROLLOUTMQ_CONTROL_PLANE", "")
PATH = f"{FOLDER}:{os.environ['PATH']}"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
pytestmark = [
    pytest.mark.slow,
    needs_kubectl,
    pytest.mark.skipif(bool(MISSING), reason=f"tests/deploy/control_plane.sh was not run: no {', '.join(MISSING)}"),
]
SPACE = "rolloutmq"
SCALED_OBJECTS = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: scaledobjects.keda.sh}
spec:
  group: keda.sh
  scope: Namespaced
  names: {kind: ScaledObject, plural: scaledobjects}
  versions:
    - name: v1alpha1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: local, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: kubernetes.io/no-provisioner
"""
CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "100"}


def older(objects: list[Object]) -> list[Object]:
    """What 1.20 does not know, as it was then."""
    for each in objects:
        if each["kind"] == "PodDisruptionBudget":
            each["apiVersion"] = "policy/v1beta1"
        if each["kind"] == "Job":
            del each["spec"]["completionMode"]
    return objects


class Cluster:
    """etcd, API server, controllers and scheduler on loopback; `kubectl` speaks to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port(embedded.PORTS)
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "tokens.csv").write_text("admin,admin,admin,system:masters\n")
        subprocess.run(["openssl", "genrsa", "-out", "sa.key", "2048"], cwd=folder, check=True, capture_output=True)
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{"name": "it", "cluster": {
                "server": f"https://127.0.0.1:{self._port}", "insecure-skip-tls-verify": True}}],
            "users": [{"name": "it", "user": {"token": "admin"}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }  # fmt: skip
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))

    def _start(self, program: str, **options: object) -> None:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        guard = [sys.executable, "-I", "-S", str(Path(parent_bound.__file__)), str(os.getpid()), ""]
        with (self._folder / f"{program}.log").open("wb") as log:
            started = subprocess.Popen(
                [*guard, str(shutil.which(program, path=PATH)), *flags],
                cwd=self._folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip
        self._processes.append(started)

    def start(self) -> None:
        store, peers = (f"http://127.0.0.1:{free_port(embedded.PORTS)}" for _ in range(2))
        self._start(
            "etcd", data_dir="etcd", listen_client_urls=store, advertise_client_urls=store, listen_peer_urls=peers
        )
        self._start(
            "kube-apiserver", etcd_servers=store, bind_address="127.0.0.1", secure_port=self._port, insecure_port=0,
            cert_dir="api", service_account_key_file="sa.key", service_account_signing_key_file="sa.key",
            service_account_issuer="https://kubernetes.default.svc", token_auth_file="tokens.csv",
            authorization_mode="RBAC", service_cluster_ip_range="10.0.0.0/24",
        )  # fmt: skip
        soon(lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok", 120, "the API server")
        common: dict[str, object] = {"kubeconfig": "kubeconfig", "leader_elect": "false", "port": 0, "secure_port": 0}
        self._start("kube-controller-manager", service_account_private_key_file="sa.key", **common)
        self._start("kube-scheduler", **common)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.communicate()

    def kubectl(self, *arguments: str, stdin: str = "", check: bool = True) -> str:
        """What it printed, errors with it if it failed."""
        command = ["kubectl", "--kubeconfig", str(self._folder / "kubeconfig"), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def get(self, *what: str) -> list[Any]:
        found: list[Any] = json.loads(self.kubectl("-n", SPACE, "get", *what, "-o", "json"))["items"]
        return found

    def add_node(self, name: str, gpus: int = 0) -> None:
        """A node that says that it is ready; with GPUs it has the taint that GPU operators give it."""
        taints = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}] if gpus else []
        capacity = CAPACITY | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        node = {
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
            "spec": {"taints": taints}, "status": {"capacity": capacity, "allocatable": capacity},
        }  # fmt: skip
        self.kubectl("create", "-f", "-", stdin=json.dumps(node))

    def add_volume(self, claim: Object) -> None:
        """What a provisioner would make of a claim."""
        name = claim["metadata"]["name"]
        spec = {key: claim["spec"][key] for key in ("accessModes", "storageClassName")}
        spec |= {"capacity": claim["spec"]["resources"]["requests"], "hostPath": {"path": f"/volumes/{name}"}}
        spec["claimRef"] = {"namespace": SPACE, "name": name}
        volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(volume))


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> str:
    components = "../cache, ../sentinel, ../trainer"
    found = rendered(tmp_path_factory.mktemp("rendered"), components=components, way="sentinel")
    return yaml.safe_dump_all(older(found))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, objects: str) -> Iterator[Cluster]:
    it = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        it.start()
        it.kubectl("apply", "-f", "-", stdin=SCALED_OBJECTS)
        # A namespace's own account comes a moment later.
        soon(lambda: "rror" not in it.kubectl("apply", "-f", "-", stdin=objects, check=False), 60, "the namespace")
        yield it
    finally:
        it.stop()


def test_all_of_it_is_taken_and_applying_it_again_restarts_nothing(cluster: Cluster, objects: str) -> None:
    def generations() -> dict[str, int]:
        found = cluster.get("deployments,statefulsets,jobs")
        return {each["metadata"]["name"]: each["metadata"].get("generation", 1) for each in found}

    before = generations()
    assert before.keys() == {"worker", "exporter", "prometheus", "redis", "sentinel", "trainer"}
    again = cluster.kubectl("apply", "-f", "-", stdin=objects).splitlines()
    assert len(again) == len(list(yaml.safe_load_all(objects))) > 40
    assert {line.split()[-1] for line in again} <= {"unchanged", "configured"}
    assert generations() == before


def test_what_is_misspelt_is_refused(cluster: Cluster, objects: str) -> None:
    wrong = objects.replace("terminationGracePeriodSeconds", "terminationGracePeriod")
    assert "terminationGracePeriod" in cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=wrong, check=False)


def test_only_the_exporter_may_do_something(cluster: Cluster) -> None:
    def may(account: str, *what: str) -> str:
        asks = ("auth", "can-i", *what, "--as", f"system:serviceaccount:{SPACE}:{account}", "-n", SPACE)
        return cluster.kubectl(*asks, check=False).split()[0]

    assert may("exporter", "patch", "pods") == "yes"
    for account, what in (("exporter", "delete"), ("worker", "patch"), ("default", "patch")):
        assert may(account, what, "pods") == "no"
    assert may("exporter", "get", "secrets") == "no"


def test_every_pod_finds_a_node(cluster: Cluster) -> None:
    """Redis and sentinels on three nodes each; workers and trainer where GPUs are, and only as many as there are."""
    for name in ("a", "b", "c"):
        cluster.add_node(name)
    cluster.add_node("gpu", gpus=2)

    def nodes() -> dict[str, str]:
        for claim in cluster.get("pvc"):
            if claim["status"]["phase"] == "Pending":
                cluster.add_volume(claim)
        return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in cluster.get("pods")}

    wanted = 3 + 3 + 4
    found = soon(lambda: (on := nodes()) and len(on) == wanted and all(on.values()) and on, 120, "all pods on nodes")
    for kind in ("redis", "sentinel"):
        assert {on for pod, on in found.items() if pod.startswith(kind)} == {"a", "b", "c"}
    for kind in ("worker", "trainer"):
        assert [on for pod, on in found.items() if pod.startswith(kind)] == ["gpu"]
    cluster.kubectl("-n", SPACE, "scale", "deployment/worker", "--replicas=2")
    told = soon(lambda: [e["message"] for e in cluster.get("events") if "nvidia.com/gpu" in e.get("message", "")], 60)
    assert any("Insufficient nvidia.com/gpu" in message for message in told)
