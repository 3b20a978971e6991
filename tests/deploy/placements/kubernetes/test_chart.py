"""The chart as Helm renders it: valid for Kubernetes, closed where it should be, and in step with our own commands."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from tests.ports import free_port
from typer.testing import CliRunner

from penstock.deploy import app, load_config
from penstock.transfer_queue.redis import find_redis_server

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: pip install 'penstock[dev]'")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed: pip install 'penstock[dev]'"
)
CHART = Path(__file__).parents[4] / "deploy" / "placements" / "kubernetes"
Objects = dict[tuple[str, str], dict[str, Any]]
"""(kind, name) → document."""
OLDEST, NEWEST = "1.33", "1.35"
ON_GPUS = {
    "run": "mine",
    "engine": "vllm",
    "image": {"registry": "registry.example.com/team/", "tag": "1", "pullSecrets": ["pull"]},
    "head": {"gpus": 8, "nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    "rollout": {"gpus": 2, "autoscaling": {"enabled": True}},
    "agent": {"autoscaling": {"enabled": True}},
    "models": {"claim": "models"},
    "recipe": {"configMap": "mine", "file": "mine.yaml", "overrides": ["trainer.ranks=8", "model=/work/models/m"]},
    "networkPolicy": {"internet": True},
    "runs": {"storageClass": "shared"},
    "redis": {"storageClass": "fast"},
}
SMALL = {"page": {"enabled": False}, "networkPolicy": {"enabled": False}}


def render(values: dict[str, Any]) -> Objects:
    """By Helm's own library, with no cluster. Raises `HelmError` if the values do not fit the chart's schema."""
    chart = helm.Chart.load(CHART)
    chart.validate_schema(values)
    files = chart.render(values, name="mine", namespace="training", is_install=True)
    documents = [d for name, text in files.items() if name.endswith(".yaml") for d in yaml.safe_load_all(text) if d]
    objects = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(objects) == len(documents), "two documents have one name"
    return objects


@pytest.fixture(scope="module")
def usual() -> Objects:
    return render({})


@pytest.fixture(scope="module")
def on_gpus() -> Objects:
    return render(ON_GPUS)


@pytest.mark.parametrize("values", [{}, ON_GPUS, SMALL], ids=["usual", "gpus", "small"])
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_document_is_valid(values: dict[str, Any], version: str) -> None:
    objects = render(values)
    assert len(objects) >= 8
    for document in objects.values():
        kubernetes_validate.validate(document, version, strict=True)
    pod = objects["Deployment", "mine-agent"]
    with pytest.raises(kubernetes_validate.ValidationError):  # the check would find a misspelt field
        kubernetes_validate.validate({**pod, "spec": {**pod["spec"], "replica": 3}}, version, strict=True)


@pytest.mark.parametrize(
    "values",
    [{"rollout": {"replica": 2}}, {"engine": "trt"}, {"run": "a b"}, {"recipe": {"overrides": ["--resume"]}}],
    ids=["misspelt", "engine", "run", "override"],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError, match=next(iter(values))):
        render(values)


def pods(objects: Objects) -> dict[str, dict[str, Any]]:
    """Component → pod template's spec."""
    templates = [o["spec"]["template"] for (kind, _), o in objects.items() if kind in KINDS_WITH_PODS]
    return {t["metadata"]["labels"]["app.kubernetes.io/component"]: t["spec"] for t in templates}


KINDS_WITH_PODS = ("Deployment", "StatefulSet", "Job")
ROLES = {"redis", "head", "rollout", "agent", "sandbox", "page"}


def test_no_pod_is_root_or_may_become_it(usual: Objects) -> None:
    found = pods(usual)
    assert set(found) == ROLES
    for role, pod in found.items():
        assert pod["securityContext"]["runAsNonRoot"] is True, role
        assert pod["securityContext"]["runAsUser"] == 10001, role
        assert pod["automountServiceAccountToken"] is False, role
        (container,) = pod["containers"]
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False, role
        assert security["readOnlyRootFilesystem"] is True, role
        assert security["capabilities"] == {"drop": ["ALL"]}, role
        assert {"requests", "limits"} <= set(container["resources"]), role
        if role != "sandbox":
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, role
            assert "procMount" not in security, role
    assert found["sandbox"]["hostUsers"] is False
    assert all(pod["containers"][0].get("readinessProbe") for role, pod in found.items() if role != "agent")
    assert all(pod["containers"][0].get("livenessProbe") for role, pod in found.items() if role != "head")


def test_gpus_are_limits_of_those_that_have_models(on_gpus: Objects) -> None:
    found = {role: pod["containers"][0]["resources"]["limits"] for role, pod in pods(on_gpus).items()}
    assert {role: limits.get("nvidia.com/gpu") for role, limits in found.items()} == {
        "redis": None, "head": 8, "rollout": 2, "agent": None, "sandbox": None, "page": None,
    }  # fmt: skip
    assert all("memory" in limits for limits in found.values())
    assert pods(on_gpus)["head"]["nodeSelector"] == {"gpu": "h100"}
    assert pods(on_gpus)["rollout"]["containers"][0]["image"] == "registry.example.com/team/penstock-rollout-vllm:1"


@pytest.mark.parametrize("seconds", [90, 400])
def test_the_head_is_killed_no_earlier_than_it_is_told(seconds: int) -> None:
    head = pods(render({} if seconds == 90 else {"head": {"stopSeconds": seconds}}))["head"]
    assert head["terminationGracePeriodSeconds"] == seconds
    assert {"name": "PENSTOCK_STOP_GRACE_S", "value": str(seconds)} in head["containers"][0]["env"]


def test_who_scales_the_servers_is_said_once(usual: Objects, on_gpus: Objects) -> None:
    assert usual["Deployment", "mine-rollout"]["spec"]["replicas"] == 1
    assert ("HorizontalPodAutoscaler", "mine-rollout") not in usual
    for name in ("mine-rollout", "mine-agent"):
        assert "replicas" not in on_gpus["Deployment", name]["spec"]
        assert on_gpus["HorizontalPodAutoscaler", name]["spec"]["scaleTargetRef"]["name"] == name


TALKS = {
    ("head", "redis"), ("rollout", "redis"), ("agent", "redis"), ("page", "redis"),
    ("agent", "rollout"), ("head", "rollout"), ("rollout", "rollout"), ("rollout", "head"),
    ("agent", "sandbox"), ("head", "sandbox"),
}  # fmt: skip
"""Who may connect to whom."""


def test_nobody_talks_to_anybody_who_is_not_named(usual: Objects, on_gpus: Objects) -> None:
    policies = policies_of(usual)
    assert set(policies) == ROLES
    assert all(policy["policyTypes"] == ["Ingress", "Egress"] for policy in policies.values())
    allowed_in = {(peer, role) for role, p in policies.items() for peer in peers(p["ingress"], "from")}
    allowed_out = {(role, peer) for role, p in policies.items() for peer in peers(p["egress"], "to")}
    assert allowed_in == allowed_out == TALKS
    assert policies["sandbox"]["egress"] == []
    assert not [rule for policy in policies.values() for rule in policy["egress"] if "ipBlock" in str(rule)]
    fetching = {role for role, policy in policies_of(on_gpus).items() if "ipBlock" in str(policy["egress"])}
    assert fetching == {"head", "rollout", "agent"}, "the internet is for those that fetch models"


COMPONENT = "app.kubernetes.io/component"


def policies_of(objects: Objects) -> dict[str, dict[str, Any]]:
    """Component → its NetworkPolicy's spec."""
    specs = [document["spec"] for (kind, _), document in objects.items() if kind == "NetworkPolicy"]
    return {spec["podSelector"]["matchLabels"][COMPONENT]: spec for spec in specs}


def peers(rules: Iterable[dict[str, Any]], side: str) -> list[str]:
    selectors = [peer.get("podSelector", {}).get("matchLabels", {}) for rule in rules for peer in rule[side]]
    return [labels[COMPONENT] for labels in selectors if COMPONENT in labels]


def test_commands_are_ones_that_penstock_has(on_gpus: Objects) -> None:
    """Each pod's own command line, parsed by the command itself."""
    group = typer.main.get_command(app)
    for role, pod in pods(on_gpus).items():
        (container,) = pod["containers"]
        if role == "redis":
            continue
        program, name = container["command"]
        arguments = [word.replace("$(POD_IP)", "10.1.2.3") for word in container["args"]]
        assert program == "penstock"
        command = group.commands[name]
        assert command.make_context(name, arguments) is not None, role


def test_the_heads_overrides_are_a_recipe(on_gpus: Objects, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: m\ndata: {train: 'generate:calculator/train?train=8&eval=4&seed=0'}\n")
    arguments = pods(on_gpus)["head"]["containers"][0]["args"]
    assert arguments[0] == "/work/recipes/mine.yaml"
    assert arguments[-1] == "--resume-if-any"
    overrides = [word.replace("$(POD_IP)", "10.1.2.3") for word in arguments[1:-1]]
    config = load_config(tmp_path / "mine.yaml", overrides)
    assert (config.name, config.rollout.engine, config.trainer.ranks) == ("mine", "vllm", 8)
    assert (config.rollout.servers, config.agent.workers) == (0, 0)
    assert (config.rollout.weight_transport, config.rollout.weights_host) == ("http", "10.1.2.3")
    assert config.transfer_queue.url == "redis://mine-redis:6379"
    assert config.sandbox.url == "http://mine-sandbox:8700"
    services = {name: o["spec"]["ports"][0]["port"] for (kind, name), o in on_gpus.items() if kind == "Service"}
    assert services == {"mine-redis": 6379, "mine-sandbox": 8700, "mine-page": 8600}


def secrets_printed(*words: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["kubernetes", "secrets", *words])
    assert result.exit_code == 0, result.output
    return list(yaml.safe_load_all(result.stdout))


def test_every_secret_that_pods_name_is_printed_and_nothing_else(usual: Objects) -> None:
    named = set()
    for pod in pods(usual).values():
        named |= {source["secretRef"]["name"] for source in pod["containers"][0].get("envFrom", [])}
        named |= {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    printed = secrets_printed("mine", "--release", "mine")
    for manifest in printed:
        kubernetes_validate.validate(manifest, NEWEST, strict=True)
    assert {manifest["metadata"]["name"] for manifest in printed} == named
    again = secrets_printed("mine", "--release", "mine")
    values = {v for m in printed for k, v in m["stringData"].items() if "USER" not in k}
    assert not values & {v for m in again for k, v in m["stringData"].items() if "USER" not in k}
    refused = CliRunner().invoke(app, ["kubernetes", "secrets", "a*"])  # its rights would reach other runs' keys
    assert (refused.exit_code, "a*" in refused.stderr) == (2, True)


@pytest.mark.redis
async def test_the_users_on_a_real_redis_as_the_chart_starts_it(usual: Objects, tmp_path: Path) -> None:
    """Rights by role; nobody without a password; the kubelet may ask whether it answers."""
    manifests = {m["metadata"]["name"]: m["stringData"] for m in secrets_printed("mine", "--release", "mine")}
    (tmp_path / "users.acl").write_text(manifests["mine-redis-users"]["users.acl"])
    assert not [v for k, v in manifests["mine-login-agent"].items() if k.endswith("PASSWORD") and v in str(tmp_path)]
    (container,) = pods(usual)["redis"]["containers"]
    port = free_port()
    told = {"6379": str(port), "/etc/penstock/users.acl": str(tmp_path / "users.acl"), "/data": str(tmp_path)}
    told["* -::*"] = "127.0.0.1"
    arguments = [told.get(word, word) for word in container["args"]]
    server = subprocess.Popen([find_redis_server().path, *arguments], stdout=subprocess.DEVNULL)
    try:
        probe = Redis(port=port, username="probe", password="probe", protocol=2)
        async with asyncio.timeout(60):
            while not await answers(probe):
                await asyncio.sleep(0.05)
        with pytest.raises(NoPermissionError):
            await probe.get("penstock:{mine}:run")
        nobody = Redis(port=port, protocol=2)
        with pytest.raises(AuthenticationError):
            await nobody.ping()
        for pod, may in (("head", True), ("agent", False), ("rollout", False)):
            login = manifests[f"mine-login-{pod}"]
            client = Redis(
                port=port, username=login["PENSTOCK_REDIS_USER"], password=login["PENSTOCK_REDIS_PASSWORD"], protocol=2
            )
            if may:
                assert await client.hset("penstock:{mine}:steps", "version", 1) == 1
            else:
                with pytest.raises(NoPermissionError):
                    await client.hset("penstock:{mine}:steps", "version", 7)
            with pytest.raises(NoPermissionError):
                await client.flushall()
            await client.aclose()
        await asyncio.gather(probe.aclose(), nobody.aclose())
    finally:
        server.terminate()
        server.wait(60)


async def answers(client: Redis) -> bool:
    try:
        return bool(await client.ping())
    except (OSError, RedisError):
        return False


def test_no_value_is_a_secret() -> None:
    text = "".join(file.read_text() for file in CHART.rglob("*") if file.is_file())
    assert "PASSWORD" not in text
    assert "stringData" not in text
