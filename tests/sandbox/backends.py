"""The backends whose sessions must keep the same promises."""

from __future__ import annotations

import pytest

from penstock.sandbox.config import SandboxConfig

BACKENDS = [
    pytest.param("bwrap", marks=pytest.mark.bwrap),
    pytest.param("docker", marks=pytest.mark.docker),
    "unsafe_subprocess",
]
CONFIG = SandboxConfig(max_boxes=4, output_bytes=4096, image="penstock-box:base")
