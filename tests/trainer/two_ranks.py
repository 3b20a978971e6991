"""A rank of a whole run, started by torchrun: two_ranks.py FOLDER MODEL. Each rank has the same scripted queue."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from trainer_support import make_job

from penstock.trainer import train


def main() -> None:
    folder, model, settings = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    job = make_job(folder, model, settings)
    job.run.queue.twin = os.environ["RANK"] != "0"
    asyncio.run(train(job))


if __name__ == "__main__":
    main()
