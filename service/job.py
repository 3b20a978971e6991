"""The job of a service's trainer, and results that are JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.rollout_server import RolloutConfig
from penstock.service.config import Quota
from penstock.service.metrics import ServiceMetrics
from penstock.trainer import TrainerConfig
from penstock.transfer_queue import RequestResult, RunContext

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class ServiceJob:
    """Everything the trainer of a service is given."""

    run: RunContext
    config: TrainerConfig
    rollout: RolloutConfig
    folder: Path
    """Points, checkpoints and samplers lie below it."""
    model_name: str
    """The base model as clients call it."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """Limits by owner."""
    log_bytes: int = 1 << 31
    """Bytes of requests in Redis that have a result and are in no point, at most."""
    metrics: ServiceMetrics = field(default_factory=ServiceMetrics)


def failed(message: str, category: str = "user") -> RequestResult:
    """The SDK raises `RequestFailedError` with this."""
    return RequestResult(JSON, json.dumps({"error": message, "category": category}).encode())


def succeeded(**fields: Any) -> RequestResult:
    return RequestResult(JSON, json.dumps(fields).encode())


def outcome_of(result: RequestResult) -> str:
    """``done``, or the category of a result that says why the request failed."""
    answer = json.loads(result.data) if result.content == JSON else {}
    return str(answer["category"]) if "error" in answer else "done"
