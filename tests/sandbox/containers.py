"""Containers as the engine itself tells of them: what the tests compare promises with."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.sandbox.harbor import packed

IMAGE = "penstock-box:base"
PLAIN_IMAGE = "penstock-box:without-python"
VOLUME_IMAGE = "penstock-box:with-volume"
LAYERED_IMAGE = "penstock-box:of-many-layers"
MANY_LAYERS = 100
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


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], input="", capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def containers_of(owner: str) -> list[str]:
    """Names, of every state."""
    return docker("ps", "-a", "--filter", f"label=penstock.owner={owner}", "--format", "{{.Names}}").split()


def images_of(owner: str) -> list[str]:
    """Ids of images that its boxes were copied into."""
    return docker("images", "-a", "-q", "--no-trunc", "--filter", f"label=penstock.owner={owner}").split()


def make_volume_image() -> None:
    """As the plain one, with python, one volume and a working folder, and root."""
    made = docker("create", IMAGE, "true")
    changes = ("VOLUME /data", "WORKDIR /work", "ENV GREETING=hello")
    docker("commit", *(f"--change={change}" for change in changes), made, VOLUME_IMAGE)
    docker("rm", made)


def make_layered_image() -> None:
    """With `MANY_LAYERS` more than the plain one: nearly as many as the engine allows."""
    copies = [f"COPY {number} /etc/{number}" for number in range(MANY_LAYERS)]
    files = {"Dockerfile": "\n".join([f"FROM {IMAGE}", *copies]), **{str(n): str(n) for n in range(MANY_LAYERS)}}
    build(LAYERED_IMAGE, {name: text.encode() for name, text in files.items()})


def build(image: str, files: dict[str, bytes]) -> None:
    """An image of these files, with a Dockerfile among them, without a network."""
    command = ["docker", "build", "--quiet", "--network", "none", "--tag", image, "-"]
    subprocess.run(command, input=packed(None, files), capture_output=True, timeout=300, check=True)


def all_boxes() -> list[str]:
    return docker("ps", "-a", "--filter", "label=penstock.owner", "--format", "{{.Names}} {{.State}}").splitlines()


def inspect(name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(docker("inspect", name))
    return found[0]


def make_plain_image() -> None:
    """Without python, and with all that an image may bring along: entrypoint, health check, volume, folder, user."""
    build(PLAIN_IMAGE, {"Dockerfile": _PLAIN.encode()})


# ---- what is left behind


def engine_leftovers(owners: Iterable[str]) -> list[str]:
    """Containers of these owners in any state, and images of their snapshots.

    Volumes, cgroups and mounts of containers that the engine has no more. Empty where no engine answers.
    """
    try:
        docker("version")
    except (OSError, subprocess.SubprocessError):
        return []
    traces = set(_traces())
    told = _told_of_all()
    # of a container that came or went in between, only one of the two looks shows a trace
    orphans = {what for what, name in traces & set(_traces()) if name not in told}
    owners = list(owners)
    containers = [f"container {name}" for owner in owners for name in containers_of(owner)]
    images = [f"image {image}" for owner in owners for image in images_of(owner)]
    return [*containers, *images, *sorted(orphans)]


def _told_of_all() -> str:
    """The engine's word on every container; one that goes meanwhile is left out."""
    known = docker("ps", "--all", "--quiet", "--no-trunc").split()
    command = ["docker", "inspect", *known]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout if known else ""


def _traces() -> Iterator[tuple[str, str]]:
    """(What it is, the name by which the engine's word on a living container must mention it)"""
    yield from ((f"volume {name}", name) for name in docker("volume", "ls", "--quiet").split())
    for group in Path("/sys/fs/cgroup").glob("*/docker/*/"):
        if group.name != "buildkit":  # the engine's own, once it has built an image; no container's
            yield f"cgroup {group}", group.name
    for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
        target = line.split()[1]
        if match := re.match(r"/var/lib/docker/[^/]+/([0-9a-f]{20,})|/run/docker/netns/([0-9a-f]+)$", target):
            yield f"mount {target}", match[1] or match[2]
