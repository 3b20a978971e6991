"""Containers as the engine itself tells of them: what the tests compare promises with."""

from __future__ import annotations

import json
import subprocess
from typing import Any

IMAGE = "penstock-box:base"
PLAIN_IMAGE = "penstock-box:without-python"
_PLAIN = f"""
FROM {IMAGE}
RUN rm /usr/bin/python3*
ENV GREETING=hello
ENTRYPOINT ["/bin/false"]
HEALTHCHECK --interval=1s CMD touch /tmp/healthy
VOLUME /data
WORKDIR /data
USER nobody
"""


def docker(*arguments: str, stdin: str = "") -> str:
    done = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def containers_of(owner: str) -> list[str]:
    """Names, of every state."""
    return docker("ps", "-a", "--filter", f"label=penstock.owner={owner}", "--format", "{{.Names}}").split()


def all_boxes() -> list[str]:
    return docker("ps", "-a", "--filter", "label=penstock.owner", "--format", "{{.Names}} {{.State}}").splitlines()


def inspect(name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(docker("inspect", name))
    return found[0]


def make_plain_image() -> None:
    """Without python, and with all that an image may bring along: entrypoint, health check, volume, folder, user."""
    docker("build", "-q", "--network", "none", "-t", PLAIN_IMAGE, "-", stdin=_PLAIN)
