"""Routes that read and remove what is recorded: sessions, runs, checkpoints and their files."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import shutil
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse

from penstock.common import HttpError
from penstock.service.calls import (
    CHECKPOINT_TYPES,
    CheckpointPath,
    CheckpointRecord,
    RunRecord,
    SamplerRecord,
    SessionRecord,
    checkpoint_folder,
)
from penstock.service.routes import ServiceContext

FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of a checkpoint that clients download: peft's."""
FIRST = Query(0, ge=0)
LIMIT = Query(100, ge=1, le=1000)


def make_record_router(context: ServiceContext) -> APIRouter:
    router = APIRouter(prefix="/api/v1")
    _add_server(router, context)
    _add_sessions(router, context)
    _add_runs(router, context)
    _add_checkpoints(router, context)
    return router


def _add_server(router: APIRouter, context: ServiceContext) -> None:
    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.post("/client/config")
    async def client_config() -> dict[str, Any]:
        """Flags of the SDK: what this server lacks is off."""
        return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False, "custom_loss_server_side": False}

    @router.post("/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": False}

    @router.post("/telemetry")
    async def telemetry() -> dict[str, str]:
        """Nothing of it is kept."""
        return {"status": "accepted"}

    @router.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        length = context.context_length
        model = {"model_name": context.model_name, "max_context_length": length, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}


def _add_sessions(router: APIRouter, context: ServiceContext) -> None:
    @router.post("/session_heartbeat")
    async def heartbeat(body: dict[str, Any], http: Request) -> dict[str, str]:
        """410 for a session that has ended: the client stops."""
        await _seen(context, str(body.get("session_id")), http)
        return {"type": "session_heartbeat"}

    @router.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, http: Request) -> dict[str, Any]:
        """The end of a session: its models and samplers are removed a while later, checkpoints stay."""
        await _seen(context, session_id, http, is_finished=True)
        return {}

    @router.get("/sessions")
    async def sessions(http: Request, offset: int = FIRST, limit: int = LIMIT) -> dict[str, Any]:
        owned = await context.records(SessionRecord, http)
        newest = sorted(owned, key=lambda name: -owned[name].created)
        return {"sessions": newest[offset : offset + limit]}

    @router.get("/sessions/{session_id}")
    async def session(session_id: str, http: Request) -> dict[str, Any]:
        record = await context.record(SessionRecord, session_id, http)
        runs = await context.records(RunRecord, http)
        samplers = await context.records(SamplerRecord, http)
        return {
            "training_run_ids": [name for name, one in runs.items() if one.session_id == session_id],
            "sampler_ids": [name for name, one in samplers.items() if one.session_id == session_id],
            "user_metadata": _texts(record.user_metadata),
        }


def _add_runs(router: APIRouter, context: ServiceContext) -> None:
    @router.get("/training_runs")
    async def training_runs(http: Request, offset: int = FIRST, limit: int = LIMIT) -> dict[str, Any]:
        owned = await context.records(RunRecord, http)
        newest = sorted(owned, key=lambda name: -owned[name].created)
        runs = [_run_of(name, owned[name], {}) for name in newest[offset : offset + limit]]
        return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": len(owned)}}

    @router.get("/training_runs/{run_id}")
    async def training_run(run_id: str, http: Request) -> dict[str, Any]:
        run = await context.record(RunRecord, run_id, http)
        return _run_of(run_id, run, await _checkpoints(context, http, run_id))

    @router.get("/training_runs/{run_id}/checkpoints")
    async def checkpoints_of_run(run_id: str, http: Request) -> dict[str, Any]:
        await context.record(RunRecord, run_id, http)
        return {"checkpoints": list((await _checkpoints(context, http, run_id)).values())}


def _add_checkpoints(router: APIRouter, context: ServiceContext) -> None:
    @router.get("/checkpoints")
    async def checkpoints(http: Request, offset: int = FIRST, limit: int = LIMIT) -> dict[str, Any]:
        everything = list((await _checkpoints(context, http)).values())
        cursor = {"offset": offset, "limit": limit, "total_count": len(everything)}
        return {"checkpoints": everything[offset : offset + limit], "cursor": cursor}

    @router.post("/weights_info")
    async def weights_info(body: dict[str, Any], http: Request) -> dict[str, Any]:
        path = str(body.get("tinker_path"))
        one = await context.record(CheckpointRecord, path, http)
        return {"base_model": one.base_model, "is_lora": True, "lora_rank": one.lora.rank, **_modules(one)}

    @router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}")
    async def delete(run_id: str, kind: str, name: str, http: Request) -> dict[str, Any]:
        path = await _path_of(context, http, run_id, kind, name)
        await CheckpointRecord.remove(context.requests, str(path))
        # In a thread: the files may be gigabytes, on a disk of another machine.
        await asyncio.to_thread(shutil.rmtree, checkpoint_folder(context.folder, path), ignore_errors=True)
        return {}

    @router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl")
    async def set_ttl(run_id: str, kind: str, name: str, body: dict[str, Any], http: Request) -> dict[str, Any]:
        path, ttl_s = await _path_of(context, http, run_id, kind, name), body.get("ttl_seconds")
        if ttl_s is not None and not (type(ttl_s) is int and ttl_s > 0):
            raise HttpError(422, "ttl_seconds", "must be a number of seconds above 0, or null")
        one = await context.record(CheckpointRecord, str(path), http)
        changed = one.model_copy(update={"expires": None if ttl_s is None else time.time() + ttl_s})
        await context.requests.put(changed.record(str(path)))
        return {}

    @router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
    async def urls(run_id: str, kind: str, name: str, http: Request) -> dict[str, Any]:
        """Addresses of the checkpoint's files, which need no key for an hour."""
        path, until = await _path_of(context, http, run_id, kind, name), int(time.time() + 3600.0)
        base = str(http.base_url).rstrip("/")
        addresses = {
            file: f"{base}/api/v1/files/{until}/{_signature(context, path, until, file)}/{run_id}/{kind}/{name}/{file}"
            for file in FILES
        }
        return {"urls": addresses, "expires": datetime.fromtimestamp(until, UTC).isoformat()}

    @router.get("/files/{until}/{signature}/{run_id}/{kind}/{name}/{file}", response_class=FileResponse)
    async def download(*, until: int, signature: str, run_id: str, kind: str, name: str, file: str) -> FileResponse:
        path = CheckpointPath.parse(f"tinker://{run_id}/{kind}/{name}")
        expected = _signature(context, path, until, file) if path is not None and file in FILES else ""
        if path is None or not expected or not hmac.compare_digest(signature.encode(), expected.encode()):
            raise HttpError(404, "", "there is no such file")
        target = checkpoint_folder(context.folder, path) / file
        if until < time.time() or not target.is_file():
            raise HttpError(410, "", "this address is over: ask for a new one")
        return FileResponse(target, filename=file)


async def _path_of(context: ServiceContext, http: Request, run_id: str, kind: str, name: str) -> CheckpointPath:
    """Raises `HttpError` 404 for a checkpoint that this key does not have."""
    path = CheckpointPath.parse(f"tinker://{run_id}/{kind}/{name}")
    if path is None:
        raise HttpError(404, "checkpoint", "there is none of this key")
    await context.record(CheckpointRecord, str(path), http)
    return path


async def _seen(context: ServiceContext, session_id: str, http: Request, *, is_finished: bool = False) -> None:
    async with context.one_session_change:  # a heartbeat must not take back the end that comes meanwhile
        record = await context.session(session_id, http)
        if record.is_finished:
            raise HttpError(410, "session_id", "the session has ended")
        changed = record.model_copy(update={"seen": time.time(), "is_finished": is_finished})
        await context.requests.put(changed.record(session_id))


def _signature(context: ServiceContext, path: CheckpointPath, until: int, file: str) -> str:
    return hmac.new(context.secret.encode(), f"{until} {path} {file}".encode(), hashlib.sha256).hexdigest()


async def _checkpoints(context: ServiceContext, http: Request, run_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the checkpoints by path, the newest first."""
    owned = await context.records(CheckpointRecord, http)
    newest = sorted(owned.items(), key=lambda item: -item[1].created)
    return {path: _checkpoint_of(one) for path, one in newest if run_id in (None, one.run_id)}


def _checkpoint_of(one: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{one.kind}/{one.name}",
        "checkpoint_type": CHECKPOINT_TYPES[one.kind],
        "time": _time(one.created),
        "tinker_path": str(one.path),
        "size_bytes": one.bytes,
        "public": False,
        "user_metadata": one.user_metadata,
        "expires_at": None if one.expires is None else _time(one.expires),
    }


def _run_of(run_id: str, run: RunRecord, checkpoints: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    def last(kind: str) -> dict[str, Any] | None:
        return next((one for one in checkpoints.values() if one["checkpoint_type"] == kind), None)

    return {
        "training_run_id": run_id,
        "base_model": run.base_model,
        "model_owner": run.owner,
        "is_lora": True,
        "lora_rank": run.rank,
        "last_request_time": _time(run.created),
        "last_checkpoint": last("training"),
        "last_sampler_checkpoint": last("sampler"),
        "user_metadata": _texts(run.user_metadata),
    }


def _modules(one: CheckpointRecord) -> dict[str, bool]:
    return {"train_unembed": False, "train_mlp": one.lora.train_mlp, "train_attn": one.lora.train_attn}


def _texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {name: str(value) for name, value in metadata.items()}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
