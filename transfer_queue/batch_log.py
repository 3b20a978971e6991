from __future__ import annotations
from pathlib import Path


class BatchLog:  # SHIM
    def __init__(self, folder: Path):
        self.d: dict[int, dict[str, bytes]] = {}

    def append(self, step, blobs, writer):
        self.d.setdefault(step, {}).update(blobs)

    def read(self, step, ids):
        return {i: b for m in self.d.values() for i, b in m.items() if i in ids}

    def drop_below(self, step):
        n = [s for s in self.d if s < step]
        for s in n:
            del self.d[s]
        return len(n)
