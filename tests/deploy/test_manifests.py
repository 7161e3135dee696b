"""deploy/kubernetes: what kubectl renders is valid, and its parts fit each other, the command line and the metrics."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from support.command_line import parse
from support.manifests import COMPONENT, DEPLOY, ROOT, Manifests, Object, Pod, needs_kubectl, rendered
from support.pools.metric_names import exporter_metrics, names
from support.prometheus import needs_promtool, promtool

from rolloutmq.ops.config import load_settings

pytestmark = needs_kubectl
HERE = Path(__file__).parent
COMPONENTS = "../cache, ../sentinel, ../trainer"
SPARE_S = 30
"""For the end of the engine's processes, behind the drain."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is rendered here always has the same secrets."""
    return tmp_path_factory.mktemp("rendered")


@pytest.fixture(scope="module")
def manifests(folder: Path) -> Manifests:
    return Manifests(rendered(folder))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    """With all components."""
    return Manifests(rendered(tmp_path_factory.mktemp("whole"), components=COMPONENTS, way="sentinel"))


@pytest.fixture(scope="module")
def ours(manifests: Manifests) -> list[Pod]:
    """The pods that run this package."""
    found = [pod for pod in manifests.pods.values() if "rolloutmq-" in pod.container["image"]]
    assert {pod.name for pod in found} == {"worker", "exporter"}
    return found


# --- each object -----------------------------------------------------------------------------------------------------


@cache
def schemas() -> tuple[Any, Any]:
    """Those of Kubernetes, and KEDA's."""
    kubernetes, keda = (
        json.loads((HERE / f"{name}.json").read_text()) for name in ("kubernetes-schemas", "keda-schema")
    )
    return kubernetes, keda


def complaints(each: Object) -> list[str]:
    """What is wrong with an object, by Kubernetes' and KEDA's schemas. Fields that do not exist are wrong."""
    kubernetes, keda = schemas()
    kinds = {kind: {"$ref": f"#/$defs/{name}"} for kind, name in kubernetes["kinds"].items()}
    schema = (kinds | {"keda.sh/v1alpha1 ScaledObject": keda})[f"{each['apiVersion']} {each['kind']}"]
    validator = Draft202012Validator(schema | {"$defs": kubernetes["$defs"]})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(each)]


def test_every_object_is_valid(manifests: Manifests, whole: Manifests) -> None:
    for each in manifests.objects + whole.objects:
        assert complaints(each) == [], each["metadata"]["name"]
    assert len(whole.objects) > len(manifests.objects) > 20


@pytest.mark.parametrize(
    ("kind", "path", "wrong"),
    [
        ("Deployment", ["spec", "template", "spec"], {"terminationGracePeriod": 5}),
        ("Deployment", ["spec", "template", "spec"], {"terminationGracePeriodSeconds": "180"}),
        ("NetworkPolicy", ["spec"], {"ingres": []}),
        ("ScaledObject", ["spec"], {"minReplicas": 0}),
        ("ScaledObject", ["spec", "triggers", 0, "metadata"], {"treshold": "1"}),
        ("ScaledObject", ["spec", "advanced", "horizontalPodAutoscalerConfig", "behavior"], {"scaleDwn": {}}),
    ],
)
def test_what_is_misspelt_is_seen(manifests: Manifests, kind: str, path: list[Any], wrong: Object) -> None:
    each = json.loads(json.dumps(next(iter(manifests.of(kind).values()))))
    place = each
    for step in path:
        place = place[step]
    place.update(wrong)
    assert complaints(each) != []


def test_every_object_lies_in_the_namespace(whole: Manifests) -> None:
    (namespace,) = whole.of("Namespace")
    others = [each for each in whole.objects if each["kind"] != "Namespace"]
    assert {each["metadata"].get("namespace") for each in others} == {namespace}


# --- what refers to what ---------------------------------------------------------------------------------------------


def test_everything_that_a_pod_names_exists(whole: Manifests) -> None:
    claims = {
        pod.mounts[path].get("persistentVolumeClaim", {}).get("claimName")
        for pod in whole.pods.values()
        for path in pod.mounts
    }
    assert claims - {None} == whole.of("PersistentVolumeClaim").keys() == {"cache", "prometheus", "trainer"}
    for kind, name, key in whole.referenced():
        assert name in whole.of(kind), f"{kind} {name}"
        assert key is None or key in whole.values(kind, name), f"{kind} {name}: {key}"
    for pod in whole.pods.values():
        for mount in pod.container.get("volumeMounts", ()):
            volume = pod.mounts[mount["mountPath"]]
            if "subPath" in mount:
                assert mount["subPath"] in whole.values("ConfigMap", volume["configMap"]["name"])


def test_selectors_select(whole: Manifests) -> None:
    for pod in whole.pods.values():
        if pod.owner["kind"] != "Job":
            assert pod in whole.selected(pod.owner["spec"]["selector"])
        for spread in pod.spec.get("topologySpreadConstraints", ()):
            assert whole.selected(spread["labelSelector"]) == [pod]
    for service in whole.of("Service").values():
        (pod,) = whole.selected(service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"].get("ports", ())} <= pod.ports.keys()
        assert {port["port"] for port in service["spec"].get("ports", ())} <= set(pod.ports.values())
    for budget in whole.of("PodDisruptionBudget").values():
        assert len(whole.selected(budget["spec"]["selector"])) == 1
    for name in ("redis", "sentinel"):
        assert whole.pods[name].owner["spec"]["serviceName"] in whole.of("Service")
    assert whole.pods["trainer"].spec["subdomain"] in whole.of("Service")


def test_policies_name_components_and_ports_that_exist(whole: Manifests) -> None:
    components = {pod.labels[COMPONENT] for pod in whole.pods.values()}
    for name, policy in whole.of("NetworkPolicy").items():
        for expression in re.findall(r'"values": (\[[^\]]*\])', json.dumps(policy)):
            assert set(json.loads(expression)) <= components, name
        mine = whole.selected(policy["spec"]["podSelector"])
        assert mine, name
        for rule in policy["spec"].get("ingress", ()):
            for port in rule.get("ports", ()):
                assert all(port["port"] in pod.ports for pod in mine), name
        for rule in policy["spec"].get("egress", ()):
            others = [pod for to in rule.get("to", ()) for pod in whole.selected(to["podSelector"])]
            for port in rule.get("ports", ()):
                assert isinstance(port["port"], int) or all(port["port"] in pod.ports for pod in others), name


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        ("worker", "redis", "redis"), ("exporter", "redis", "redis"), ("redis", "redis", "redis"),
        ("prometheus", "worker", "metrics"), ("prometheus", "exporter", "metrics"), ("worker", "worker", "any"),
        ("trainer", "redis", "redis"), ("trainer", "worker", "any"), ("worker", "trainer", "any"),
        ("trainer", "trainer", "any"), ("redis", "sentinel", "sentinel"), ("sentinel", "sentinel", "sentinel"),
        ("sentinel", "redis", "redis"), ("worker", "sentinel", "sentinel"), ("trainer", "sentinel", "sentinel"),
        ("exporter", "sentinel", "sentinel"),
    ],
)  # fmt: skip
def test_who_has_to_speak_to_whom_may(whole: Manifests, source: str, target: str, port: str) -> None:
    sends, takes = whole.pods[source], whole.pods[target]

    def allowed(direction: str, peers: str, at: Pod, other: Pod) -> bool:
        policies = [p["spec"] for p in whole.of("NetworkPolicy").values()]
        rules = [
            rule
            for policy in policies
            if policy["podSelector"] == {} or at in whole.selected(policy["podSelector"])
            for rule in policy.get(direction, ())
        ]
        return any(
            other in whole.selected(peer["podSelector"])
            for rule in rules
            if "ports" not in rule or port in [one["port"] for one in rule["ports"]]
            for peer in rule.get(peers, ())
            if "podSelector" in peer
        )

    assert allowed("egress", "to", sends, takes)
    assert allowed("ingress", "from", takes, sends)
    assert not allowed("ingress", "from", whole.pods["redis"], whole.pods["prometheus"])


def test_the_first_pod_of_redis_is_the_primary_for_everybody(manifests: Manifests) -> None:
    (config,) = [name for name in manifests.of("ConfigMap") if name.startswith("redis-")]
    primary = manifests.values("ConfigMap", config)["primary"]
    selector = manifests.of("Service")["redis"]["spec"]["selector"]
    assert selector["statefulset.kubernetes.io/pod-name"] == primary == "redis-0"
    for name in ("worker", "exporter"):
        assert "@redis.rolloutmq.svc:6379/0?" in manifests.environment(manifests.pods[name])["ROLLOUTMQ_REDIS"]


# --- pods ------------------------------------------------------------------------------------------------------------


def test_every_pod_is_restricted(whole: Manifests) -> None:
    """As the namespace demands: otherwise none of them would start."""
    labels = whole.of("Namespace")["rolloutmq"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in whole.pods.values():
        assert pod.spec["securityContext"]["runAsNonRoot"]
        assert pod.spec["securityContext"]["runAsUser"] > 0
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        kinds = {kind for volume in pod.spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
        assert pod.spec["enableServiceLinks"] is False
        assert {"requests", "limits"} == pod.container["resources"].keys()


def test_only_the_exporter_speaks_to_kubernetes(manifests: Manifests) -> None:
    with_token = [pod.name for pod in manifests.pods.values() if pod.spec["automountServiceAccountToken"]]
    assert with_token == ["exporter"]
    (role,) = manifests.of("Role").values()
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    (binding,) = manifests.of("RoleBinding").values()
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", "exporter")


def test_commands_and_variables_are_real(manifests: Manifests, ours: list[Pod], tmp_path: Path) -> None:
    for pod in ours:
        parse(pod.container["args"])
    environment = manifests.environment(manifests.pods["worker"])
    mounted = manifests.pods["worker"].mounts["/etc/rolloutmq"]["secret"]
    (item,) = mounted["items"]
    (tmp_path / item["path"]).write_text(manifests.values("Secret", mounted["secretName"])[item["key"]])
    url = environment["ROLLOUTMQ_REDIS"].replace("/etc/rolloutmq", str(tmp_path))
    settings = load_settings(environment=environment | {"ROLLOUTMQ_REDIS": url})
    assert settings.worker().metrics_port == manifests.pods["worker"].ports["metrics"]
    assert settings.engine().model
    arguments = manifests.pods["exporter"].container["args"]
    assert int(arguments[arguments.index("--port") + 1]) == manifests.pods["exporter"].ports["metrics"]
    pools = {manifests.environment(pod)["ROLLOUTMQ_POOL"] for pod in ours}
    pools |= set(re.findall(r'pool="(\w+)"', trigger(manifests)["metadata"]["query"]))
    (config,) = [name for name in manifests.of("ConfigMap") if name.startswith("prometheus-")]
    told = manifests.values("ConfigMap", config)["prometheus.yml"]
    pools |= set(re.findall(r"(?:pool:|label: pool, replacement:) (\w+)", told))
    assert pools == {settings.worker().pool}


def test_a_variable_that_is_no_setting_is_seen(manifests: Manifests) -> None:
    """Also one that Kubernetes would add for a Service called rolloutmq-worker."""
    environment = manifests.environment(manifests.pods["worker"])
    with pytest.raises(Exception, match="no such setting"):
        load_settings(environment=environment | {"ROLLOUTMQ_WORKER_SERVICE_HOST": "10.0.0.1"})


def test_probes_ask_what_is_served(manifests: Manifests) -> None:
    served = {"worker": {"/live", "/ready"}, "exporter": {"/live", "/ready"}}
    for pod in manifests.pods.values():
        probes = {name: probe for name, probe in pod.container.items() if name.endswith("Probe")}
        for probe in probes.values():
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] in pod.ports
                assert probe["httpGet"]["path"] in served.get(pod.name, {"/-/ready", "/-/healthy"})
    worker = manifests.pods["worker"].container
    assert worker["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert worker["livenessProbe"]["httpGet"]["path"] == "/live"


def test_a_worker_has_the_time_it_needs(manifests: Manifests) -> None:
    worker = manifests.pods["worker"]
    drain_s = float(manifests.environment(worker)["ROLLOUTMQ_WORKER_DRAIN_S"])
    assert worker.spec["terminationGracePeriodSeconds"] >= drain_s + SPARE_S
    probe = worker.container["startupProbe"]
    starts_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert starts_s >= 3600
    assert worker.owner["spec"]["progressDeadlineSeconds"] > starts_s
    assert "replicas" not in worker.owner["spec"], "applying the manifests again would undo what KEDA has decided"


def test_a_worker_can_write_where_it_has_to(manifests: Manifests) -> None:
    text = (DEPLOY / "containers" / "worker.Containerfile").read_text()
    said = dict(re.findall(r"\b(HOME|ROLLOUTMQ_\w+)=(\S+)", text))
    home = said.pop("HOME")
    compiled = load_settings(environment=said | {"ROLLOUTMQ_ENGINE_MODEL": "m"}).engine().cache_dir
    assert (home, compiled) == ("/cache", "/cache/compiled")
    for folder in (home, compiled, "/tmp", "/dev/shm"):
        assert manifests.pods["worker"].writable(folder), folder
    assert manifests.pods["exporter"].writable("/tmp")
    assert not manifests.pods["worker"].writable("/etc/rolloutmq")


# --- scaling and monitoring ------------------------------------------------------------------------------------------


def trigger(manifests: Manifests) -> Object:
    (one,) = manifests.of("ScaledObject")["worker"]["spec"]["triggers"]
    assert isinstance(one, dict)
    return one


def test_keda_asks_for_a_metric_that_exists_where_it_is(manifests: Manifests) -> None:
    assert manifests.of("ScaledObject")["worker"]["spec"]["scaleTargetRef"]["name"] in manifests.of("Deployment")
    asked = trigger(manifests)["metadata"]
    assert set(re.findall(r"\brolloutmq_\w+", asked["query"])) <= names(exporter_metrics())
    host, _, port = asked["serverAddress"].removeprefix("http://").partition(":")
    service, namespace, _ = host.split(".")
    assert namespace in manifests.of("Namespace")
    assert int(port) in [one["port"] for one in manifests.of("Service")[service]["spec"]["ports"]]


@needs_promtool
def test_keda_hears_the_number_or_nothing(manifests: Manifests, tmp_path: Path) -> None:
    """An empty answer is an error, and then KEDA leaves the pool as it is."""
    asked = trigger(manifests)
    assert (asked["metadata"]["ignoreNullValues"], asked["metadata"]["threshold"]) == ("false", "1")
    states: dict[str, list[Object]] = {
        "3": [{"labels": "{}", "value": 3}], "0": [{"labels": "{}", "value": 0}], "stale": [],
    }  # fmt: skip
    series = 'rolloutmq_wanted_workers{pool="default",job="rolloutmq-exporter",instance="exporter:9477"}'
    tests = [
        {
            "interval": "15s",
            "input_series": [{"series": series, "values": value}],
            "promql_expr_test": [{"expr": asked["metadata"]["query"], "eval_time": "0s", "exp_samples": expected}],
        }
        for value, expected in states.items()
    ]
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": tests}))
    promtool("test", "rules", "test.yml", cwd=tmp_path)


@needs_promtool
def test_prometheus_reads_the_rules_and_finds_everybody(manifests: Manifests, tmp_path: Path) -> None:
    prometheus = manifests.pods["prometheus"]
    for path, volume in prometheus.mounts.items():
        if "configMap" in volume:
            folder = tmp_path / path.removeprefix("/etc/prometheus/")
            folder.mkdir()
            for name, text in manifests.values("ConfigMap", volume["configMap"]["name"]).items():
                (folder / name).write_text(text.replace("/etc/prometheus/", f"{tmp_path}/"))
    promtool("check", "config", "config/prometheus.yml", cwd=tmp_path)
    assert (tmp_path / "rules" / "rules.yml").read_text() == (DEPLOY / "monitoring" / "rules.yml").read_text()
    config = yaml.safe_load((tmp_path / "config" / "prometheus.yml").read_text())
    exporter, workers = config["scrape_configs"]
    service, _, port = exporter["static_configs"][0]["targets"][0].partition(":")
    assert int(port) in [one["port"] for one in manifests.of("Service")[service]["spec"]["ports"]]
    (found,) = workers["dns_sd_configs"]
    service, namespace = found["names"][0].split(".")[:2]
    assert namespace in manifests.of("Namespace")
    headless = manifests.of("Service")[service]["spec"]
    assert headless["clusterIP"] == "None"
    assert found["port"] == headless["ports"][0]["port"]
    for name in ("exporter", "workers"):  # just when they are not ready their metrics matter
        assert manifests.of("Service")[name]["spec"]["publishNotReadyAddresses"]
    assert {"job_name: rolloutmq-exporter", "job_name: rolloutmq-workers"} <= set(
        re.findall(r"job_name: \S+", (DEPLOY / "monitoring" / "prometheus.yml").read_text())
    ), "the rules know the jobs by these names"


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "changed"), list(enumerate(["redis", "worker"])))
def test_each_change_that_the_page_shows_is_valid(
    number: int, changed: str, folder: Path, manifests: Manifests
) -> None:
    blocks = re.findall(
        r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "kubernetes.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 2
    after = Manifests(rendered(folder, blocks[number]))
    for each in after.objects:
        assert complaints(each) == []
    assert after.pods[changed].spec != manifests.pods[changed].spec
    if changed == "redis":
        selector = after.of("Service")["redis"]["spec"]["selector"]
        assert selector["statefulset.kubernetes.io/pod-name"] == "redis-1"
        assert after.environment(after.pods["redis"])["PRIMARY"] == "redis-1"
    if "SPOT" in blocks[number]:
        assert after.environment(after.pods["worker"])["ROLLOUTMQ_WORKER_SPOT"] == "aws"
