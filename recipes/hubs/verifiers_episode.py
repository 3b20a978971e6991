"""One rollout of an environment of verifiers (its classic API) on the model of this episode, run by the loop `command`.

    python3 verifiers_episode.py ENVIRONMENT NUMBER [ARGUMENTS as JSON]

NUMBER is that of a row of the environment's own dataset. Its rubric's reward goes to ~/reward.json. Ends with 1 where
the environment reports an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from verifiers.legacy.types import ClientConfig
from verifiers.legacy.utils.env_utils import load_environment


async def main(name: str, number: str, arguments: str = "{}") -> int:
    environment = load_environment(name, **json.loads(arguments))
    rows = environment.get_dataset()
    client = ClientConfig(
        api_base_url=os.environ["OPENAI_BASE_URL"],
        api_key_var="OPENAI_API_KEY",
        max_retries=0,
        max_connections=8,
        max_keepalive_connections=8,
    )
    row = dict(rows[int(number) % len(rows)])
    output = await environment.run_rollout(row, client, os.environ["OPENAI_MODEL"], {})
    error = output.get("error")
    result = {"reward": output["reward"], "metrics": output.get("metrics") or {}, "error": error}
    (Path.home() / "reward.json").write_text(json.dumps(result, default=str))
    if error:
        print(error, file=sys.stderr)
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
