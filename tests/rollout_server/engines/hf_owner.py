"""A process that owns an hf engine, to be killed: prints the engine's pid, then keeps it decoding."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.hf import HFEngine
from penstock.rollout_server.protocol import GenerateRequest, Sampling


async def main() -> None:
    config = RolloutConfig(max_model_len=512, kv_cache_tokens=4096)
    engine = HFEngine(config, sys.argv[1], Path(sys.argv[2]), 0)
    await engine.start()
    assert engine.process is not None
    print(engine.process.pid, flush=True)
    while True:
        async for _ in engine.generate(GenerateRequest(token_ids=[1, 2], sampling=Sampling(max_new_tokens=400))):
            pass


asyncio.run(main())
