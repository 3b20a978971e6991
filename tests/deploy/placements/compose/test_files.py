"""What the compose file and the Dockerfile promise, read off the files themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.deploy.placements.compose.stack import FILES, IMAGE_USER

DOCKERFILE = (FILES.parent / "images" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((FILES / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {"sandbox", "head", "rollout", "agent", "page", "exporter"}


def test_nothing_but_the_page_is_published_and_that_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"page": ["127.0.0.1:${PENSTOCK_PAGE_PORT:-8600}:8600"]}
    assert not [name for name, service in SERVICES.items() if "network_mode" in service or "expose" in service]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_an_ordinary_user_that_is_watched_and_started_again(name: str) -> None:
    service = SERVICES[name]
    assert re.match(r"\$\{PENSTOCK_UID:\?.*\}:\$\{PENSTOCK_GID:\?.*\}$", service["user"])
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert "no-new-privileges:true" in service["security_opt"]
    assert not {"privileged", "cap_add", "devices", "pid", "ipc", "userns_mode"} & set(service)
    assert "docker.sock" not in json.dumps(service)
    assert service["healthcheck"]["test"]
    assert service["restart"].partition(":")[0] in ("on-failure", "unless-stopped")
    assert service["init"] is True


def test_compose_sandbox_filter_names_what_it_needs() -> None:
    plain = ["no-new-privileges:true"]
    others = {name: service["security_opt"] for name, service in SERVICES.items() if name != "sandbox"}
    assert all(options == plain for options in others.values()), others
    assert SERVICES["sandbox"]["security_opt"] == [
        *plain,
        "seccomp=./sandbox-seccomp.json",
        "systempaths=unconfined",
        "apparmor=${PENSTOCK_SANDBOX_APPARMOR:-unconfined}",
    ]
    assert {"mem_limit", "cpus", "pids_limit"} <= set(SERVICES["sandbox"])


def test_compose_sandbox_filter_allows_only_what_boxes_use() -> None:
    profile = json.loads((FILES / "sandbox-seccomp.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    rules = [rule for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW"]
    anyhow = {name for rule in rules if "args" not in rule for name in rule["names"]}
    refused = (
        "bpf ptrace keyctl add_key request_key userfaultfd perf_event_open io_uring_setup io_uring_enter "
        "io_uring_register init_module finit_module kexec_load kexec_file_load open_by_handle_at setns chroot "
        "process_vm_readv process_vm_writev kcmp reboot swapon settimeofday clock_settime syslog mount_setattr "
        "move_mount open_tree fsopen fsmount fsconfig pidfd_getfd fanotify_init clone3 personality acct quotactl"
    )
    assert not anyhow & set(refused.split())
    assert {"clone", "mount", "umount2", "pivot_root", "unshare", "sethostname"} <= anyhow


def test_networks_and_profiles_keep_services_apart() -> None:
    assert {name: network.get("internal", False) for name, network in COMPOSE["networks"].items()} == {
        "queue": True,
        "boxes": True,
        "metrics": True,
        "edge": False,
    }
    members = {net: {n for n, s in SERVICES.items() if net in s["networks"]} for net in COMPOSE["networks"]}
    assert members == {
        "queue": {"redis", "head", "rollout", "agent", "page", "exporter"},
        "boxes": {"sandbox", "head", "agent", "prometheus"},
        "metrics": {"rollout", "exporter", "prometheus"},
        "edge": {"page"},
    }
    assert {n: s["profiles"] for n, s in SERVICES.items() if "profiles" in s} == {
        "exporter": ["metrics"],
        "prometheus": ["metrics"],
    }


def test_secrets_are_files_and_each_service_has_the_fewest() -> None:
    held = {
        name: {s if isinstance(s, str) else s["source"] for s in service.get("secrets", [])}
        for name, service in SERVICES.items()
    }
    assert held == {
        "redis": {"redis_users", "watch_login"},
        "sandbox": {"sandbox_login"},
        "head": {"owner_login"},
        "rollout": {"rollout_login"},
        "agent": {"agent_login"},
        "page": {"page_login"},
        "exporter": {"watch_login"},
        "prometheus": {"token"},
    }
    for service in SERVICES.values():
        told = json.dumps([service.get("environment", {}), service.get("command", ""), service.get("build", {})])
        assert not re.search("password|token", told, re.IGNORECASE)


def test_every_image_of_ours_runs_as_an_ordinary_user() -> None:
    stages = _stages(DOCKERFILE)
    targets = {service["build"]["target"] for name, service in SERVICES.items() if name in OURS}
    assert targets == {"core", "sandbox", "head", "rollout-${PENSTOCK_ENGINE:-hf}"}
    for target in ("core", "sandbox", "head", "rollout-hf", "rollout-vllm", "rollout-sglang"):
        assert _user(stages, target) == f"{IMAGE_USER}:{IMAGE_USER}", target


def test_images_take_no_secret_and_only_the_sources() -> None:
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert arguments == {"BASE_IMAGE", "VLLM_IMAGE", "SGLANG_IMAGE", "TORCH_BACKEND"}
    assert "COPY" not in DOCKERFILE  # what is only bound stays in no layer
    root = Path(__file__).parents[4]
    ignored = (root / ".dockerignore").read_text().split()
    assert "*" in ignored
    packages = {path.name for path in (root / "src" / "penstock").iterdir() if path.is_symlink()}
    assert packages <= {line[1:] for line in ignored if line.startswith("!")}


def _stages(text: str) -> dict[str, tuple[str, list[str]]]:
    """Name → (what it is made from, its instructions)."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]
    return {name: (base, body.splitlines()) for base, name, body in zip(*[iter(parts)] * 3, strict=True)}


def _user(stages: dict[str, tuple[str, list[str]]], name: str) -> str | None:
    if name not in stages:
        return None
    base, body = stages[name]
    users = [line.split()[1] for line in body if line.startswith("USER ")]
    return users[-1] if users else _user(stages, base)
