"""What deploy/ has for containers: nodes take the configurations in it, and Kubernetes what the chart renders.

The chart's test needs helm (`go install helm.sh/helm/v3/cmd/helm@latest`, in some minutes) on the path, and Kubernetes'
schemas (`pip install kubernetes-validate`); `make chart` brings both. Without them it is skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.project.imports import ROOT
from tickwheel.node.config.read import read_config
from tickwheel.node.config.sections import NodeConfig

CHART = ROOT / "deploy" / "helm" / "tickwheel"
KUBERNETES = ("1.25", "1.34")
"""The oldest version that the chart takes, and a recent one."""
OF_OTHERS = {"Certificate": "cert-manager.io/v1", "ServiceMonitor": "monitoring.coreos.com/v1"}
"""Kinds that are no part of Kubernetes."""
ISSUED = {"tls": {"certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}}
PLAIN = {"tls": {"enabled": False, "allowPlaintext": True}}


def taken(text: str, path: Path, environment: dict[str, str] | None = None) -> NodeConfig:
    """The configuration as a node reads it."""
    path.write_text(text, encoding="utf-8")
    return read_config(path, environment)


def test_compose_starts_three_nodes_that_find_each_other(tmp_path: Path) -> None:
    """Each service's environment: its own id and address among the members, no port twice. Nothing but the environment,
    since podman-compose passes over `configs`."""
    text = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    head, _, body_of_all = text.partition("\nservices:\n")
    variable = re.compile(r"^ +(TICKWHEEL_\w+): \"?([^\s\"]+)\"?$", re.MULTILINE)
    common = dict(variable.findall(head))
    assert "configs" not in re.findall(r"^ *(\w+):", text, re.MULTILINE) and "command: [node]" in head
    services = re.findall(r"^  (n\d):\n((?:    .*\n)+)", body_of_all, re.MULTILINE)
    services = [(name, body) for name, body in services if "<<: *node" in body]
    assert [name for name, _ in services] == ["n1", "n2", "n3"]
    published: list[str] = []
    for name, body in services:
        assert "<<: *environment" in body
        config = taken("", tmp_path / "node.toml", common | dict(variable.findall(body)))
        assert config.node.id == name == re.findall(r"hostname: (\S+)", body)[0]
        own = next(member for member in config.cluster.members if member.node_id == name)
        port = config.listen.client_bind.rpartition(":")[2]
        assert own.client_address == f"{name}:{port}" and own.peer_address == f"{name}:7701"
        assert f"127.0.0.1:{port}:{port}" in body
        published += re.findall(r"127\.0\.0\.1:(\d+):", body)
        assert f'["{name}:{config.node.data_dir.removesuffix("/data")}"]' in body
    assert len(published) == len(set(published)) == 6
    assert all(line.count("127.0.0.1") for line in re.findall(r"ports: (\[.*\])", text)), "no port for the world"


needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm: make chart")


def rendered(values: dict[str, Any], tmp_path: Path) -> list[dict[str, Any]]:
    """The objects that helm makes of the chart."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: make chart")
    done = helm("template", values, tmp_path)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def helm(command: str, values: dict[str, Any], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """`helm template` of a release `prod` in the namespace `mail`, or `helm lint`.

    A helm that `go install` built assumes an old Kubernetes unless it is told.
    """
    path = tmp_path / "values.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    what = ["prod", str(CHART), "--namespace", "mail"] if command == "template" else ["--strict", str(CHART)]
    return subprocess.run(
        ["helm", command, *what, "--values", str(path), "--kube-version", KUBERNETES[0]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_helm
@pytest.mark.parametrize(
    "values",
    [
        ISSUED | {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
        {"tls": {"secretPrefix": "given"}, "replicas": 5, "foundingReplicas": 3, "antiAffinity": "soft"},
        PLAIN
        | {"replicas": 1, "foundingReplicas": 1, "config": {"log": {"level": "debug"}, "raft": {"lease_ms": 250}}},
    ],
    ids=["issued", "given", "plain"],
)
def test_the_chart_renders_what_kubernetes_and_nodes_take(values: dict[str, Any], tmp_path: Path) -> None:
    """Linted strictly; every object against the schemas; every node's configuration as the node reads it; the names
    that the configurations dial are those that the services and certificates give."""
    linted = helm("lint", values, tmp_path)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    objects = rendered(values, tmp_path)
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: make chart")
    for found in objects:
        if found["kind"] in OF_OTHERS:
            assert found["apiVersion"] == OF_OTHERS[found["kind"]]
            continue
        for version in KUBERNETES:
            validator.validate(found, version, strict=True)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for found in objects:
        by_kind.setdefault(found["kind"], []).append(found)
    [pods], [files] = by_kind["StatefulSet"], by_kind["ConfigMap"]
    count, name = pods["spec"]["replicas"], pods["metadata"]["name"]
    domain = f"{pods['spec']['serviceName']}.mail.svc.cluster.local"
    assert pods["spec"]["serviceName"] in {service["metadata"]["name"] for service in by_kind["Service"]}
    certificates = {found["spec"]["commonName"]: found["spec"]["dnsNames"] for found in by_kind.get("Certificate", [])}
    pod = pods["spec"]["template"]["spec"]
    [container] = pod["containers"]
    for ordinal in range(count):
        node_id, host = f"{name}-{ordinal}", f"{name}-{ordinal}.{domain}"
        config = taken(files["data"][f"{node_id}.toml"], tmp_path / "node.toml")
        assert config.node.id == node_id and config.listen.peer_advertised == f"{host}:7701"
        founds = ordinal < values.get("foundingReplicas", 3)
        assert [member.node_id for member in config.cluster.members] == (
            [f"{name}-{n}" for n in range(values.get("foundingReplicas", 3))] if founds else []
        )
        if founds:
            assert config.cluster.members[ordinal].client_address == f"{host}:7700"
        assert config.listen.insecure != bool(config.tls.client_cert_file)
        if certificates:
            assert host in certificates[node_id]
        if config.tls.client_cert_file:
            folder = config.tls.client_cert_file.removeprefix("/etc/tickwheel/tls/")
            [tls] = [volume["projected"] for volume in pod["volumes"] if volume["name"] == "tls"]
            paths = [item["path"] for source in tls["sources"] for item in source["secret"]["items"]]
            assert folder in paths
    assert container["args"][-1] == "/etc/tickwheel/config/$(POD_NAME).toml"
    assert container["startupProbe"]["httpGet"]["path"] == container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    affinity = pod["affinity"]["podAntiAffinity"]
    assert ("requiredDuringSchedulingIgnoredDuringExecution" in affinity) == (values.get("antiAffinity") != "soft")
    assert by_kind["PodDisruptionBudget"][0]["spec"]["maxUnavailable"] == 1
    for monitor in by_kind.get("ServiceMonitor", []):
        [job] = [
            rule["replacement"] for rule in monitor["spec"]["endpoints"][0]["relabelings"] if "replacement" in rule
        ]
        assert job.startswith("tickwheel"), "alerts and dashboard take these jobs"


@needs_helm
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "tls.certManager.enabled"),
        ({"tls": {"certManager": {"enabled": True}}}, "name an issuer"),
        ({"tls": {"enabled": False}}, "allowPlaintext"),
        (ISSUED | {"foundingReplicas": 5}, "at most replicas"),
        (ISSUED | {"preStopSeconds": 30, "terminationGracePeriodSeconds": 40}, "preStopSeconds + 15"),
        (ISSUED | {"replica": 5}, "replica"),
        (ISSUED | {"antiAffinity": "some"}, "antiAffinity"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Before anything is installed, with the value to change."""
    done = helm("template", values, tmp_path)
    assert done.returncode != 0 and said in done.stderr
