"""Whether a box can be had for tools and rewards that run code."""

from __future__ import annotations

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.boxes import try_sandbox
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.sources import rewards_of


def needs_boxes(config: RunConfig) -> bool:
    return bool(config.tools) or "code" in rewards_of(config)


def check_sandbox(config: RunConfig) -> Check | None:
    if not needs_boxes(config):
        return None
    from penstock.sandbox import SandboxError

    try:
        try_sandbox(config)
    except SandboxError as error:
        return Check("sandbox", False, config.sandbox.backend, str(error))
    return Check("sandbox", True, config.sandbox.backend)
