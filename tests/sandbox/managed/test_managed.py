"""What every managed backend promises beside a session's own promises: failures by type, nothing lost, nothing left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.sandbox.backends import on_every_provider
from tests.sandbox.managed.harness import MANAGED, Managed, managed_sandbox, replica_of
from tests.sandbox.managed.replica import Replica
from tests.sandbox.server.conftest import TOKEN, serving
from tests.until import until

from penstock.sandbox import BoxNeeds, RemoteSandbox, SandboxConfig, SandboxError, SandboxLost, make_sandbox
from penstock.sandbox.config import SandboxServerConfig
from penstock.sandbox.managed import KEYS, end_boxes_of_dead_processes
from penstock.sandbox.managed.api import ApiUnavailable, CostLimit
from penstock.sandbox.managed.labels import box_labels, is_abandoned, label_value
from penstock.sandbox.managed.pods import deny_all
from penstock.sandbox.managed.sandbox import ManagedSandbox
from penstock.sandbox.protocol import NoSuchImage, SandboxBusy, UnmetNeeds

pytestmark = pytest.mark.bwrap
CONFIG = SandboxConfig(max_boxes=4, run_timeout_s=30.0)
NEWEST = "1.35"
"""Of Kubernetes, as far as its schemas are at hand."""


def config_with(**managed: object) -> SandboxConfig:
    return CONFIG.model_copy(update={"managed": CONFIG.managed.model_copy(update=managed)})


@pytest_asyncio.fixture(params=sorted(MANAGED))
async def managed(request: pytest.FixtureRequest) -> AsyncIterator[Managed]:
    async with managed_sandbox(request.param, config_with(start_timeout_s=60.0)) as made:
        yield made


@on_every_provider
async def test_run_survives_a_broken_connection(managed: Managed) -> None:
    session = await managed.sandbox.start("cut off")
    await session.run_python("x = 1")
    count = "echo a >> /tmp/ran; echo started; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo ended"
    stream = session.stream(["sh", "-c", count], timeout_s=60.0)
    assert (await anext(stream)).data == "started\n"
    managed.replica.hang_up()
    (box,) = managed.replica.boxes.values()
    await (await box.run(["touch", "/tmp/go"])).wait()
    rest = [piece async for piece in stream]
    assert [piece.data for piece in rest] == ["ended\n", ""]
    assert rest[-1].result is not None
    assert rest[-1].result.stdout == "started\nended\n"
    assert (await session.read_file("ran")) == b"a\n"  # done once, though it was asked for twice
    managed.replica.hang_up()
    assert (await session.run_python("x")).stdout == "1\n"


async def test_session_is_lost_with_its_box(managed: Managed) -> None:
    session = await managed.sandbox.start("ended by the provider")
    for box_id in list(managed.replica.boxes):
        managed.replica.end(box_id)
    with pytest.raises(SandboxLost):
        await session.run_python("1")
    other = await managed.sandbox.start("after it")
    assert (await other.run_python("1")).stdout == "1\n"


@pytest.mark.parametrize("fault", ["429", "500"])
async def test_refused_start_is_asked_again(managed: Managed, fault: str) -> None:
    managed.replica.create_faults.queue = [fault, fault]
    session = await managed.sandbox.start("patient")
    assert (await session.run(["echo", "here"])).stdout == "here\n"
    assert managed.replica.create_faults.seen == [fault, fault, "ok"]


@on_every_provider
@pytest.mark.parametrize("backend", sorted(MANAGED))
async def test_refusals_have_a_type_and_an_end(backend: str) -> None:
    async with managed_sandbox(backend, config_with(retry_for_s=0.0)) as managed:
        for faults, expected in (["429"] * 3, SandboxBusy), (["500"] * managed.replica.asks_again, ApiUnavailable):
            managed.replica.create_faults.queue = list(faults)
            with pytest.raises(expected):
                await managed.sandbox.start("refused")
            managed.replica.create_faults.queue = []
        session = await managed.sandbox.start("once it answers again")  # no place was lost
        assert (await session.run(["true"])).exit_code == 0


@pytest.mark.parametrize("backend", sorted(MANAGED))
async def test_silent_start_makes_one_box(backend: str) -> None:
    async with managed_sandbox(backend, config_with(start_timeout_s=3.0)) as managed:
        managed.replica.create_faults.queue = ["lost"]  # it is made, and the answer never comes
        session = await managed.sandbox.start("in doubt")
        assert (await session.run(["echo", "one"])).stdout == "one\n"
        assert len(managed.replica.boxes) == 1


@pytest.mark.parametrize("backend", sorted(MANAGED))
async def test_silence_blocks_nobody_else(backend: str) -> None:
    async with managed_sandbox(backend, config_with(start_timeout_s=300.0)) as managed:
        managed.replica.create_faults.queue = ["silence"]
        waiting = asyncio.create_task(managed.sandbox.start("unanswered"))
        await until(lambda: managed.replica.create_faults.seen == ["silence"])
        session = await managed.sandbox.start("beside it")
        assert (await session.run(["echo", "beside"])).stdout == "beside\n"
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_box_that_would_not_end_is_ended_later(managed: Managed) -> None:
    sandbox = managed.sandbox
    sandbox.config = config_with(retry_for_s=0.0).model_copy(update={"backend": managed.config.backend})
    first = await sandbox.start("stubborn")
    managed.replica.end_faults.queue = ["500"] * 4
    await first.close()
    assert len(managed.replica.boxes) == 1
    managed.replica.end_faults.queue = []
    second = await sandbox.start("the next")
    await until(lambda: len(managed.replica.ended) == 1)
    assert (await second.run(["true"])).exit_code == 0
    await sandbox.close()
    assert not managed.replica.boxes


@on_every_provider
@pytest.mark.parametrize("backend", sorted(MANAGED))
async def test_run_collects_what_its_killed_process_left(backend: str) -> None:
    async with replica_of(backend, CONFIG) as (replica, config):
        living = ManagedSandbox(config, "run-a")
        kept = await living.start("of a living process")
        mine, others = await orphan(replica, "run-a"), await orphan(replica, "run-b")
        sandbox = ManagedSandbox(config, "run-a")
        try:
            await sandbox.start("the next life")
            await until(lambda: mine not in replica.boxes)
            assert others in replica.boxes  # another run's
            assert (await kept.run(["echo", "kept"])).stdout == "kept\n"
        finally:
            await sandbox.close()
            await living.close()
        assert list(replica.boxes) == [others]


async def test_boxes_of_dead_processes_are_ended_whichever_runs_they_are() -> None:
    async with replica_of("kubernetes", CONFIG) as (replica, config):
        living = ManagedSandbox(config, "run-a")
        try:
            session = await living.start("of a living process")
            (kept,) = replica.boxes
            for owner in ("run-a", "run-b"):
                await orphan(replica, owner)
            assert await end_boxes_of_dead_processes(config) == 2
            assert list(replica.boxes) == [kept]
            assert (await session.run(["echo", "kept"])).stdout == "kept\n"
            assert await end_boxes_of_dead_processes(config) == 0
        finally:
            await living.close()


async def test_orphans_of_a_pod_that_is_gone_end_past_their_time() -> None:
    """A worker that starts again is on another machine, as far as it can tell."""
    async with replica_of("kubernetes", CONFIG) as (replica, config):
        before = ManagedSandbox(config, "tests")
        await before.start("anything")
        (asked,) = (box.asked for box in replica.boxes.values())
        await before.close()
        labels = {**box_labels("run-a", "s", "r", -60.0), "penstock-machine": "another"}
        replica.make(labels, "base", {**asked, "metadata": {"name": "left", "labels": labels}}, "left")
        sandbox = ManagedSandbox(config, "run-a")
        try:
            session = await sandbox.start("of the new pod")
            await until(lambda: "left" not in replica.boxes)
            await session.close()
        finally:
            await sandbox.close()


@pytest.mark.parametrize("spec", [{"podSelector": {}, "policyTypes": ["Ingress"]}, None])
async def test_network_policy_of_the_name_is_read(spec: dict | None) -> None:
    """One that exists may let boxes out."""
    async with replica_of("kubernetes", CONFIG) as (replica, config):
        policy = deny_all()
        replica.policies["penstock-boxes"] = {**policy, "spec": spec or policy["spec"]}
        sandbox = ManagedSandbox(config, "tests")
        try:
            if spec is None:
                assert (await (await sandbox.start("denied")).run(["true"])).exit_code == 0
            else:
                with pytest.raises(SandboxError, match=r"penstock-boxes.*delete it"):
                    await sandbox.start("let out")
        finally:
            await sandbox.close()


async def orphan(replica: Replica, owner: str) -> str:
    """A box whose maker was killed: made as one of ours, by a process that has ended."""
    maker = await asyncio.create_subprocess_exec("true")
    await maker.wait()
    labels = {**box_labels(owner, "s", f"r{owner}", 3600), "penstock-process": f"{maker.pid}-1"}
    asked = next(iter(replica.boxes.values())).asked
    if "spec" in asked:
        asked = {**asked, "metadata": {"name": owner, "labels": labels}}
    return replica.make(labels, "base", asked, owner).box_id


async def test_costs_are_counted_and_limited() -> None:
    async with managed_sandbox("e2b", config_with(price_per_hour=3600.0, cost_limit=0.5)) as managed:
        session = await managed.sandbox.start("a second costs one")
        await session.run(["sleep", "0.6"])
        await session.close()
        costs = managed.sandbox.costs
        assert costs.boxes == 1
        assert costs.cost == pytest.approx(costs.box_seconds)
        spent = costs.cost
        assert spent >= 0.6
        with pytest.raises(CostLimit, match=r"sandbox\.managed\.cost_limit"):
            await managed.sandbox.start("too many")
        assert costs.cost == spent  # an ended box costs nothing more
        assert not managed.replica.boxes


async def test_unknown_image_is_named(managed: Managed) -> None:
    with pytest.raises(NoSuchImage, match="no-such-image"):
        await managed.sandbox.start("a typing mistake", image="no-such-image")
    assert not managed.replica.boxes


async def test_labels_name_owner_machine_and_process(managed: Managed) -> None:
    await managed.sandbox.start("anything")
    (box,) = managed.replica.boxes.values()
    assert (box.labels["penstock"], box.labels["penstock-owner"]) == ("box", "tests")
    assert box.labels["penstock-process"].startswith(f"{os.getpid()}-")
    assert not is_abandoned(box.labels)
    assert is_abandoned({**box.labels, "penstock-process": "1-1"})
    elsewhere = {**box.labels, "penstock-machine": "another"}
    assert not is_abandoned(elsewhere)
    assert is_abandoned({**elsewhere, "penstock-ends": "1"})


def test_label_values_fit_everywhere() -> None:
    assert label_value("agent-0") == "agent-0"
    made = label_value("a run/with: odd ÄÖÜ " + "x" * 100)
    assert len(made) <= 63
    assert made.isascii()
    assert label_value("a/b") != label_value("a:b")


@pytest.mark.parametrize("backend", sorted(MANAGED))
async def test_missing_or_wrong_keys_name_the_fix(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with replica_of(backend, config_with(retry_for_s=0.0)) as (_, config):
        if backend in KEYS:
            monkeypatch.setenv(KEYS[backend][0], "a wrong key")
            refused = ManagedSandbox(config, "tests")
            with pytest.raises(SandboxError, match=KEYS[backend][0]):
                await refused.start("a test")
            await refused.close()
            monkeypatch.delenv(KEYS[backend][0])
        else:
            monkeypatch.setenv("KUBECONFIG", "/nowhere/kubeconfig")
        with pytest.raises(SandboxError, match=KEYS.get(backend, ("KUBECONFIG",))[0]):
            make_sandbox(config, "tests")


@pytest.mark.parametrize("backend", ["kubernetes", "modal"])
async def test_refusal_says_when_to_ask_again(backend: str) -> None:
    async with managed_sandbox(backend, config_with(retry_for_s=0.0)) as managed:
        managed.replica.create_faults.queue, managed.replica.create_faults.retry_after_s = ["429"], 7.0
        with pytest.raises(SandboxBusy) as refused:
            await managed.sandbox.start("refused")
        assert refused.value.after_s == 7.0


async def test_pods_are_walled_in() -> None:
    async with managed_sandbox("kubernetes", CONFIG.model_copy(update={"own_root": True})) as managed:
        await managed.sandbox.start("plain")
        await managed.sandbox.start("root", needs=BoxNeeds(own_root=True, memory_mb=512, cpus=0.5))
        plain, root = (box.asked["spec"] for box in managed.replica.boxes.values())
        assert (plain["automountServiceAccountToken"], plain["enableServiceLinks"]) == (False, False)
        wall = plain["containers"][0]["securityContext"]
        assert (wall["runAsNonRoot"], wall["readOnlyRootFilesystem"], wall["capabilities"]) == (
            True,
            True,
            {"drop": ["ALL"]},
        )
        assert plain["containers"][0]["resources"]["limits"] == {"memory": "256Mi", "cpu": "1000m"}
        limits = {"memory": "512Mi", "cpu": "500m", "ephemeral-storage": "10240Mi"}
        assert root["containers"][0]["resources"]["limits"] == limits
        (policy,) = managed.replica.policies.values()
        selected = policy["spec"]["podSelector"]["matchLabels"].items()
        assert all(selected <= box.labels.items() for box in managed.replica.boxes.values())
        assert "egress" not in policy["spec"]  # a direction that is named and has no rule is forbidden


async def test_manifests_are_what_an_api_server_takes() -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: pip install 'penstock[dev]'"
    )
    configured = CONFIG.model_copy(update={"own_root": True, "runtime": "gvisor"})
    async with managed_sandbox("kubernetes", configured) as managed:
        await managed.sandbox.start("plain")
        await managed.sandbox.start("root", needs=BoxNeeds(own_root=True, memory_mb=512, cpus=0.5))
        for box in managed.replica.boxes.values():
            kubernetes_validate.validate(box.asked, NEWEST, strict=True)
        for policy in managed.replica.policies.values():
            kubernetes_validate.validate(policy, NEWEST, strict=True)


@pytest.mark.deep
async def test_modal_box_is_asked_for_with_its_walls() -> None:
    async with managed_sandbox("modal", CONFIG.model_copy(update={"own_root": True})) as managed:
        await managed.sandbox.start("plain")
        await managed.sandbox.start("sized", needs=BoxNeeds(own_root=True, memory_mb=512, cpus=0.5))
        plain, sized = (box.asked["definition"] for box in managed.replica.boxes.values())
        assert plain.network_access.network_access_type == type(plain.network_access).BLOCKED
        assert (plain.timeout_secs, list(plain.secret_ids), list(plain.open_ports.ports)) == (900, [], [])
        resources = [(d.resources.milli_cpu_max, d.resources.memory_mb_max) for d in (plain, sized)]
        assert resources == [(1000, 256), (500, 512)]
        asked = b"".join(managed.replica.wire)
        assert b"penstock-owner" in asked
        assert os.environ["MODAL_TOKEN_SECRET"].encode() not in asked
        with pytest.raises(UnmetNeeds, match="storage_mb"):
            await managed.sandbox.start("large", needs=BoxNeeds(own_root=True, storage_mb=10))


@pytest.mark.deep
async def test_modal_copies_end_with_their_maker() -> None:
    async with managed_sandbox("modal", CONFIG.model_copy(update={"own_root": True})) as managed:
        session = await managed.sandbox.start("trunk", needs=BoxNeeds(own_root=True))
        images = set(managed.replica.images)
        snapshots = [await managed.sandbox.snapshot(session) for _ in range(2)]
        made = set(managed.replica.images) - images
        await managed.sandbox.forget(snapshots[0])
        assert len(made & set(managed.replica.images)) == 1
        del managed.replica.images[next(iter(made & set(managed.replica.images)))]  # at its age, or by its owner
        with pytest.raises(SandboxLost, match="image of snapshot"):
            await managed.sandbox.fork(snapshots[1], "too late")
        last = await managed.sandbox.snapshot(session)
        for box_id in list(managed.replica.boxes):
            managed.replica.end(box_id)
        with pytest.raises(SandboxLost):
            await managed.sandbox.snapshot(session)
        await managed.sandbox.close()
        assert set(managed.replica.images) == images
        with pytest.raises(SandboxLost):
            await managed.sandbox.fork(last, "after the end")


def test_needs_that_a_template_decides_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "any")
    sandbox = ManagedSandbox(CONFIG.model_copy(update={"backend": "e2b"}), "tests")
    with pytest.raises(UnmetNeeds, match="memory_mb"):
        sandbox.check_needs(BoxNeeds(memory_mb=512))


async def test_server_keeps_managed_boxes_warm() -> None:
    async with replica_of("e2b", CONFIG) as (replica, config):
        warm = config.model_copy(update={"server": SandboxServerConfig(warm={"default": 2})})
        async with serving(warm) as url:
            await until(lambda: len(replica.boxes) == 2)
            remote = RemoteSandbox(CONFIG, url, TOKEN)
            session = await remote.start("pooled")
            assert (await session.run_python("6 * 7")).stdout == "42\n"
            await session.close()
            await remote.close()
        await until(lambda: not replica.boxes)
