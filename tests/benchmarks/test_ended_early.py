"""A benchmark that is ended leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest


@pytest.mark.deep
async def test_files_go_with_a_benchmark_that_is_ended(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    settings = {"TMPDIR": str(tmp_path), "PENSTOCK_BENCH_UPDATES": "100000"}
    penstock = Path(sys.executable).with_name("penstock")
    process = await asyncio.create_subprocess_exec(
        penstock, "bench", "weights", env={**os.environ, **settings}, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(500):
            while not list(tmp_path.glob("penstock-bench-*/*.safetensors")):
                await asyncio.sleep(0.05)
            process.terminate()
            status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert status == 128 + signal.SIGTERM
    assert list(tmp_path.glob("penstock-*")) == []  # torch keeps a folder of its own beside them
