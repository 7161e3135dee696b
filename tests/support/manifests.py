"""The manifests of deploy/, as kubectl renders them, and what their parts refer to."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPONENT = "app.kubernetes.io/component"
POD_NAME = "statefulset.kubernetes.io/pod-name"


def _renders() -> bool:
    """Whether there is a kubectl that has kustomize 4 or newer in it (1.24 and newer say so), and openssl."""
    if not (shutil.which("kubectl") and shutil.which("openssl")):
        return False
    told = subprocess.run(["kubectl", "version", "--client", "-o", "json"], capture_output=True, text=True, check=False)
    return "kustomizeVersion" in told.stdout


needs_kubectl = pytest.mark.skipif(not _renders(), reason="no kubectl 1.24 or newer, or no openssl, to render with")
Object = dict[str, Any]


def rendered(folder: Path, overlay: str = "", components: str = "", way: str = "one") -> list[Object]:
    """deploy/example in a copy below `folder`, whose secrets are made once. overlay: a kustomization on top of it.

    components: what the example takes in, "../cache, ../trainer". way: what the URLs name, "one" server or "sentinel".
    """
    example = folder / "deploy" / "example"
    if not example.exists():
        shutil.copytree(DEPLOY, folder / "deploy", ignore=shutil.ignore_patterns("secrets"))
        subprocess.run(
            ["sh", "../kubernetes/secrets.sh", "secrets", "default", "rolloutmq", way], cwd=example, check=True
        )
        (folder / "overlay").mkdir()
    ours = example / "kustomization.yaml"
    ours.write_text(re.sub(r"^components: .*", f"components: [{components}]", ours.read_text(), flags=re.MULTILINE))
    base = "namespace: rolloutmq\nresources: [../deploy/example]\n"
    (folder / "overlay" / "kustomization.yaml").write_text(base + overlay)
    shown = subprocess.run(["kubectl", "kustomize", "overlay"], cwd=folder, check=False, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return [each for each in yaml.safe_load_all(shown.stdout) if each]


@dataclass(frozen=True)
class Pod:
    """The pods of one Deployment, StatefulSet or Job."""

    owner: Object

    @property
    def name(self) -> str:
        return str(self.owner["metadata"]["name"])

    @property
    def spec(self) -> Object:
        spec: Object = self.owner["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Object:
        (one,) = self.spec["containers"]
        assert isinstance(one, dict)
        return one

    @property
    def labels(self) -> dict[str, str]:
        """Those that Kubernetes adds are among them, of the first pod."""
        labels = dict(self.owner["spec"]["template"]["metadata"]["labels"])
        return labels | ({POD_NAME: f"{self.name}-0"} if self.owner["kind"] == "StatefulSet" else {})

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", ())}

    @property
    def mounts(self) -> dict[str, Object]:
        """Mount path -> volume; a claim of a StatefulSet is one, too."""
        claims = {claim["metadata"]["name"]: {} for claim in self.owner["spec"].get("volumeClaimTemplates", ())}
        volumes = claims | {volume["name"]: volume for volume in self.spec.get("volumes", ())}
        return {mount["mountPath"]: volumes[mount["name"]] for mount in self.container.get("volumeMounts", ())}

    def writable(self, path: str) -> bool:
        """Whether the container may write there although its root file system is read-only."""
        volumes = [v for at, v in self.mounts.items() if path == at or path.startswith(at + "/")]
        return any("configMap" not in volume and "secret" not in volume for volume in volumes)


@dataclass(frozen=True)
class Manifests:
    """All objects of one namespace."""

    objects: list[Object]

    def of(self, kind: str) -> dict[str, Object]:
        return {each["metadata"]["name"]: each for each in self.objects if each["kind"] == kind}

    @property
    def pods(self) -> dict[str, Pod]:
        return {
            name: Pod(owner) for kind in ("Deployment", "StatefulSet", "Job") for name, owner in self.of(kind).items()
        }

    def selected(self, selector: Object) -> list[Pod]:
        """The pods with these labels, or that this LabelSelector means. A trainer is not among them."""
        return [pod for pod in self.pods.values() if _matches(selector, pod.labels)]

    def environment(self, pod: Pod) -> dict[str, str]:
        """What the container sees, but for optional ones; a secret's value is decoded."""
        found: dict[str, str] = {}
        for source in pod.container.get("envFrom", ()):
            found |= self.values("ConfigMap", source["configMapRef"]["name"])
        for variable in pod.container.get("env", ()):
            origin = variable.get("valueFrom", {})
            for field, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
                if field in origin and not origin[field].get("optional"):
                    found[variable["name"]] = self.values(kind, origin[field]["name"])[origin[field]["key"]]
            if "value" in variable:
                found[variable["name"]] = variable["value"]
        return found

    def values(self, kind: str, name: str) -> dict[str, str]:
        """What a ConfigMap or Secret holds."""
        data = self.of(kind)[name].get("data", {})
        return {key: base64.b64decode(value).decode() if kind == "Secret" else value for key, value in data.items()}

    def referenced(self) -> Iterator[tuple[str, str, str | None]]:
        """(kind, name, key or None) of each ConfigMap, Secret and ServiceAccount that a pod names."""
        for pod in self.pods.values():
            if "serviceAccountName" in pod.spec:
                yield "ServiceAccount", pod.spec["serviceAccountName"], None
            for volume in pod.spec.get("volumes", ()):
                for field, kind, named in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
                    if field in volume:
                        yield kind, volume[field][named], None
                        for item in volume[field].get("items", ()):
                            yield kind, volume[field][named], item["key"]
            for source in pod.container.get("envFrom", ()):
                yield "ConfigMap", source["configMapRef"]["name"], None
            for variable in pod.container.get("env", ()):
                for field, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
                    chosen = variable.get("valueFrom", {}).get(field, {"optional": True})
                    if not chosen.get("optional"):
                        yield kind, chosen["name"], chosen["key"]


def _matches(selector: Object, labels: dict[str, str]) -> bool:
    if "matchLabels" not in selector and "matchExpressions" not in selector:
        return selector.items() <= labels.items()
    asked = [one for one in selector.get("matchExpressions", ()) if one["operator"] == "In"]
    assert len(asked) == len(selector.get("matchExpressions", ()))
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in asked
    )
