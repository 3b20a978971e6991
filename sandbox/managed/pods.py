"""The pod of a box: all of its containment in one place."""

from __future__ import annotations

from typing import Any

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.managed.api import BoxRequest
from penstock.sandbox.managed.labels import BOX
from penstock.sandbox.protocol import OWN_ROOT_CAPABILITIES

CONTAINER = "box"
NO_NETWORK = {"penstock-network": "none"}
UID = 64_123
"""No user of an image: it owns nothing there."""
KEEP_OPEN = ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait; done"]
"""Command that keeps the container open. As first process it also reaps orphans."""


def pod_manifest(name: str, config: SandboxConfig, request: BoxRequest) -> dict[str, Any]:
    """Returns the body of the create call. The pod gets no token and no service addresses of the cluster."""
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": request.ttl_s,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(config, request)],
        "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": f"{config.tmp_mb}Mi"}}],
    }
    if config.runtime is not None:
        spec["runtimeClassName"] = config.runtime
    labels = {**request.labels, **({} if config.managed.network else NO_NETWORK)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def _container(config: SandboxConfig, request: BoxRequest) -> dict[str, Any]:
    needs = request.needs
    limits = {
        "memory": f"{needs.memory_mb or config.memory_mb}Mi",
        "cpu": f"{round((needs.cpus or config.cpus) * 1000)}m",
    }
    if needs.own_root:
        limits["ephemeral-storage"] = f"{needs.storage_mb or config.own_limits.storage_mb}Mi"
    security: dict[str, Any] = {
        **{"runAsUser": UID, "runAsGroup": UID, "runAsNonRoot": True, "readOnlyRootFilesystem": True},
        **{"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if needs.own_root:
        security = {
            **{"runAsUser": 0, "runAsGroup": 0, "readOnlyRootFilesystem": False, "allowPrivilegeEscalation": False},
            "capabilities": {"drop": ["ALL"], "add": list(OWN_ROOT_CAPABILITIES)},
        }
    return {
        "name": CONTAINER,
        "image": request.image or config.image,
        "command": KEEP_OPEN,
        "resources": {"limits": limits, "requests": limits},
        "securityContext": security,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - the box's own
    }


def deny_all() -> dict[str, Any]:
    """The policy that denies both directions to every box without network."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "penstock-boxes", "labels": BOX},
        "spec": {"podSelector": {"matchLabels": {**BOX, **NO_NETWORK}}, "policyTypes": ["Ingress", "Egress"]},
    }
