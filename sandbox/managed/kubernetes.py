"""Boxes as pods of a Kubernetes cluster, by its Python client's asynchronous half.

    KubernetesApi ──REST──► API server            a program in a pod: ──WebSocket (v4.channel.k8s.io)──► kubelet

The cluster is the one of KUBECONFIG (or ~/.kube/config), or this pod's own. The account needs, in the namespace,
`create`, `get`, `list` and `delete` of pods, `create` and `get` of pods/exec, and `create` and `get` of
networkpolicies where boxes have no network.
A pod's name is made of its request, so a request that comes twice makes one pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.managed.api import (
    CALL_TIMEOUT_S,
    CLOSE_S,
    ApiBusy,
    ApiUnavailable,
    BoxRequest,
    Channel,
    ChannelBroken,
    ListedBox,
    asked_pause_s,
)
from penstock.sandbox.managed.labels import BOX
from penstock.sandbox.managed.pods import CONTAINER, deny_all, pod_manifest
from penstock.sandbox.protocol import BoxNeeds, NoSuchImage, SandboxError, SandboxLost

if TYPE_CHECKING:
    from aiohttp import ClientWebSocketResponse
    from kubernetes.aio.client import ApiClient, CoreV1Api, NetworkingV1Api, V1Pod

IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
POLL_S = 0.25
PING_S = 20.0
"""A connection without traffic is cut by load balancers after a minute or so."""
WRITE_BYTES = 256 << 10
_STDIN, _STDOUT, _STDERR, _STATUS = 0, 1, 2, 3
_REFUSED, _NOT_FOUND, _CONFLICT, _INVALID, _BUSY, _SERVER_ERROR = (401, 403), 404, 409, (400, 422), 429, 500


class KubernetesApi:
    def __init__(self, config: SandboxConfig) -> None:
        """Raises `SandboxError` where the client or a kubeconfig is missing."""
        try:
            import kubernetes.aio.client  # noqa: F401 - whether it is there
        except ImportError as error:
            raise SandboxError("the `kubernetes` package is missing: `pip install 'penstock[kubernetes]'`") from error
        self._config = config
        self._file = _kubeconfig()
        self._client: ApiClient | None = None
        self._exec_client: ApiClient | None = None
        self._namespace = config.managed.namespace or "default"
        self._connecting = asyncio.Lock()
        no_network = ", no network as far as the cluster's network plugin enforces NetworkPolicy"
        network = " with the cluster's network" if config.managed.network else no_network
        self.containment = f"a pod per session{network}, read-only root, no capabilities, memory and CPU limits"
        if config.own_root:
            self.containment += "; with an own root: as root, seven capabilities"

    def check_needs(self, needs: BoxNeeds) -> None:
        """A pod may have whatever size its node has room for."""

    async def create(self, request: BoxRequest) -> str:
        name = f"penstock-{request.key}"
        pods = await self._pods()
        manifest = pod_manifest(name, self._config, request)
        with contextlib.suppress(AlreadyThere), self._translating("making a pod"):
            await pods.create_namespaced_pod(self._namespace, manifest, _request_timeout=CALL_TIMEOUT_S)
        try:
            await self._running(pods, name)
        except BaseException:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(self.end(name))
            raise
        return name

    async def _running(self, pods: CoreV1Api, name: str) -> None:
        """Until its container runs; the caller has the deadline. Raises `NoSuchImage`, `SandboxError`."""
        while True:
            with self._translating("waiting for a pod"):
                pod = await pods.read_namespaced_pod(name, self._namespace, _request_timeout=CALL_TIMEOUT_S)
            if _is_running(pod):
                return
            await asyncio.sleep(POLL_S)

    async def find(self, labels: Mapping[str, str]) -> list[ListedBox]:
        pods = await self._pods()
        boxes: list[ListedBox] = []
        rest: str | None = None
        selector = ",".join(f"{name}={value}" for name, value in {**BOX, **labels}.items())
        while rest != "":
            with self._translating("listing pods"):
                page = await pods.list_namespaced_pod(
                    self._namespace,
                    label_selector=selector,
                    limit=500,
                    _continue=rest,
                    _request_timeout=CALL_TIMEOUT_S,
                )
            boxes += [ListedBox(pod.metadata.name, pod.metadata.labels) for pod in page.items]
            rest = page.metadata.var_continue or ""
        return boxes

    async def end(self, box_id: str) -> None:
        pods = await self._pods()
        with contextlib.suppress(SandboxLost), self._translating("deleting a pod"):
            await pods.delete_namespaced_pod(
                box_id, self._namespace, grace_period_seconds=0, _request_timeout=CALL_TIMEOUT_S
            )

    async def open(self, box_id: str, argv: Sequence[str], *, root: bool) -> Channel:
        """Runs as the container's user: an `own_root` pod runs as root."""
        from kubernetes.aio.client import CoreV1Api

        await self._pods()
        with self._translating("starting a program in a pod"):
            opening = await CoreV1Api(self._exec_client).connect_get_namespaced_pod_exec_without_preload_content(
                box_id,
                self._namespace,
                command=list(argv),
                container=CONTAINER,
                stdin=True,
                stdout=True,
                stderr=True,
                tty=False,
            )
            return PodChannel(await opening)

    async def close(self) -> None:
        for client in (self._client, self._exec_client):
            if client is not None:
                await client.close()
        self._client = self._exec_client = None

    async def _pods(self) -> CoreV1Api:
        """Connects at the first call, which is inside a running loop."""
        from kubernetes.aio.client import CoreV1Api

        async with self._connecting:
            if self._client is None:
                await self._connect()
        return CoreV1Api(self._client)

    async def _connect(self) -> None:
        """Forbids the network of boxes first: without that no box starts. Raises `SandboxError`."""
        from kubernetes.aio import client as api
        from kubernetes.aio import config as kubeconfig
        from kubernetes.aio.stream import WsApiClient

        settings = api.Configuration()
        # in addition to the one that each box holds
        settings.connection_pool_maxsize = self._config.max_boxes + 16
        try:
            if self._file is not None:
                loader = await kubeconfig.load_kube_config(self._file, client_configuration=settings)
                namespace = loader.current_context["context"].get("namespace")
            else:
                kubeconfig.load_incluster_config(client_configuration=settings)
                namespace = (IN_CLUSTER / "namespace").read_text(encoding="utf-8").strip()
        except (kubeconfig.ConfigException, OSError, ValueError) as error:
            raise SandboxError(f"kubernetes: {self._file or IN_CLUSTER} cannot be used: {error}") from error
        self._namespace = self._config.managed.namespace or namespace or "default"
        client = api.ApiClient(settings)
        try:
            if not self._config.managed.network:
                policies = api.NetworkingV1Api(client)
                try:
                    with self._translating("making a network policy"):
                        await policies.create_namespaced_network_policy(
                            self._namespace, deny_all(), _request_timeout=CALL_TIMEOUT_S
                        )
                except AlreadyThere:
                    await self._check_policy(client, policies)
        except BaseException:
            await client.close()
            raise
        self._exec_client = WsApiClient(settings, heartbeat=PING_S)
        self._client = client

    async def _check_policy(self, client: ApiClient, policies: NetworkingV1Api) -> None:
        """Raises `SandboxError` where the policy of our name is another one: boxes would have a network."""
        expected = deny_all()
        name = expected["metadata"]["name"]
        with self._translating("reading a network policy"):
            policy = await policies.read_namespaced_network_policy(
                name, self._namespace, _request_timeout=CALL_TIMEOUT_S
            )
        spec = client.sanitize_for_serialization(policy.spec)
        if {key: value for key, value in spec.items() if value} != expected["spec"]:
            raise SandboxError(
                f"kubernetes: NetworkPolicy {name} in {self._namespace} is not the one that denies boxes the network:"
                " delete it, and it is made anew"
            )

    @contextlib.contextmanager
    def _translating(self, doing: str) -> Iterator[None]:
        """Raises our errors for the client's."""
        import aiohttp
        from kubernetes.aio.client.exceptions import ApiException

        try:
            yield
        except ApiException as error:
            raise _failure(doing, error.status, _message(error), dict(error.headers or {})) from error
        except aiohttp.WSServerHandshakeError as error:
            raise _failure(doing, error.status, error.message, dict(error.headers or {})) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiUnavailable(f"kubernetes: {doing}: {type(error).__name__} {error}") from error
        except ValueError as error:  # pydantic's among them
            raise SandboxError(f"kubernetes: {doing}: an answer that the client cannot read: {error}") from error


def _kubeconfig() -> str | None:
    """None: this process is in a pod, whose service account serves. Raises `SandboxError` where neither is here."""
    named = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    if all(Path(part).is_file() for part in named.split(os.pathsep)):
        return named
    if IN_CLUSTER.is_dir() and "KUBECONFIG" not in os.environ:
        return None
    raise SandboxError(
        f"sandbox.backend is kubernetes: {named} is missing: set KUBECONFIG to a cluster's, or run this in a pod"
        " with a service account"
    )


class AlreadyThere(SandboxError):
    """Something of that name exists."""


def _message(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def _failure(doing: str, status: int, message: str, headers: Mapping[str, str]) -> SandboxError:
    text = f"kubernetes: {doing}: {status} {message}"
    if status == _BUSY:
        return ApiBusy(text, asked_pause_s(headers))
    if status >= _SERVER_ERROR:
        return ApiUnavailable(text)
    if status in _REFUSED:
        if "exceeded quota" in message:
            return ApiBusy(text)
        return SandboxError(f"{text}: give this account that right in the namespace (sandbox.managed.namespace)")
    if status == _NOT_FOUND:
        return SandboxLost(text)
    return AlreadyThere(text) if status == _CONFLICT else SandboxError(text)


def _is_running(pod: V1Pod) -> bool:
    """Raises `NoSuchImage` and `SandboxError` if it never will be."""
    status = pod.status
    if status.phase in ("Failed", "Succeeded"):
        raise SandboxError(f"kubernetes: pod {pod.metadata.name} ended: {status.reason} {status.message}")
    for container in status.container_statuses or ():
        if container.state.running is not None:
            return True
        waiting = container.state.waiting
        no_image = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
        if waiting is not None and waiting.reason in no_image:
            raise NoSuchImage(
                f"kubernetes: image {container.image}: {waiting.reason} {waiting.message}: push it where the cluster"
                " can pull it, or name another (sandbox.image)"
            )
        if container.state.terminated is not None:
            raise SandboxError(f"kubernetes: pod {pod.metadata.name} ended: {container.state.terminated.reason}")
    return False


class PodChannel:
    """A message is a byte that names the stream, and its data. No message closes stdin: with the connection it ends."""

    def __init__(self, connection: ClientWebSocketResponse) -> None:
        self.stderr_tail = ""
        self._connection = connection

    async def write(self, data: bytes) -> None:
        try:
            for start in range(0, len(data), WRITE_BYTES):
                await self._connection.send_bytes(bytes([_STDIN]) + data[start : start + WRITE_BYTES])
        except (ConnectionError, RuntimeError) as error:
            raise ChannelBroken(f"kubernetes: writing to a pod: {error}") from error

    async def read(self) -> bytes:
        import aiohttp

        async for message in self._connection:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            stream, data = message.data[0], message.data[1:]
            if stream == _STDOUT and data:
                return bytes(data)
            if stream == _STDERR:
                self.stderr_tail = (self.stderr_tail + data.decode("utf-8", "replace"))[-2000:].strip()
            if stream == _STATUS and b'"Failure"' in data and not self.stderr_tail:
                self.stderr_tail = data.decode("utf-8", "replace")[-2000:]
        return b""

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(CLOSE_S):
                await self._connection.close()
