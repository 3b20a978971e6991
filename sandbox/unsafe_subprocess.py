"""No box at all: a subprocess in a temporary folder, as this process's own user. Only for code that you trust.

It speaks the same protocol, so tests and machines without namespaces can run tools; a time limit, the output limit
and CPU seconds hold, nothing else does.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from dataclasses import replace

from penstock.sandbox.bundle import compile_driver, driver_command
from penstock.sandbox.bwrap.process_box import BoxCommand, ProcessBox
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.limited import DriverSandbox, SessionSlot
from penstock.sandbox.protocol import BoxNeeds, SandboxError, UnmetNeeds

logger = logging.getLogger(__name__)


class UnsafeSubprocessSandbox(DriverSandbox):
    """Code runs with this user's rights, sees the network and every file this user sees."""

    containment = "unsafe_subprocess: none; code runs with this user's rights"

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        if config.folders:
            raise SandboxError("sandbox.folders: unsafe_subprocess has no boxes; name the folders of this machine")
        self._driver = compile_driver(sys.executable)
        self._folder = tempfile.mkdtemp(prefix=f"penstock-unsafe-{os.getpid()}-")
        logger.warning("sandbox: %s", self.containment)

    def check_needs(self, needs: BoxNeeds) -> None:
        if replace(needs, clean_cache=False) != BoxNeeds():
            raise UnmetNeeds("unsafe_subprocess has no boxes with limits or roots of their own: use docker or bwrap")

    async def _launch(self, slot: SessionSlot) -> ProcessBox:
        root = os.path.join(self._folder, str(slot.slot))
        shutil.rmtree(root, ignore_errors=True)
        os.makedirs(root)
        settings: dict[str, object] = {
            "boxed": False,
            "root": root,
            "cpu_s": self.config.cpu_s,
            "output_bytes": self.config.output_bytes,
        }
        env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": root, "LANG": "C.UTF-8"}
        argv = tuple(driver_command(sys.executable, settings, "{0}"))
        return await ProcessBox.start(BoxCommand(argv, (self._driver,), cwd=root, env=env))

    async def close(self) -> None:
        await super().close()
        shutil.rmtree(self._folder, ignore_errors=True)
