"""A process that owns an engine, to be killed: prints the engine's process group once it decodes, then goes on so."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from penstock.rollout_server import GenerateRequest, RolloutConfig, Sampling, make_engine


async def main() -> None:
    config = RolloutConfig.model_validate_json(sys.argv[1])
    engine: Any = make_engine(config, sys.argv[2], Path(sys.argv[3]), 0)
    await engine.start()
    pid = engine.process.pid if config.engine == "hf" else engine.server.pid
    request = GenerateRequest(token_ids=[1, 2], sampling=Sampling(max_new_tokens=400))
    while True:
        async for _ in engine.generate(request):
            print(os.getpgid(pid), flush=True)


asyncio.run(main())
