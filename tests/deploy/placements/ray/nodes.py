"""Nodes of a Ray cluster, in a separate process. What they write lies in RAY_TMPDIR, which must be set.

A line with a number on stdin starts a node with so many CPUs and prints its raylet's pid and the cluster's address as
JSON; the first node is the head. The end of stdin ends all of them. `ray start` would do, were it not for its ports:
only where Ray takes 127.0.0.1 for a node's address, as it does on other systems, do they stay on loopback.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

STORE_BYTES = 80 << 20
START_S = 300


def main() -> None:
    # `Cluster` notes its address in Ray's default folder, whoever made that and whatever `temp_dir` says.
    folder = Path(os.environ["RAY_TMPDIR"], "ray")
    folder.mkdir()
    cluster = Cluster(shutdown_at_exit=True)
    head = {"include_dashboard": False, "no_monitor": True, "temp_dir": str(folder)}
    for line in sys.stdin:
        further = {} if cluster.head_node else head
        node = cluster.add_node(wait=False, num_cpus=int(line), object_store_memory=STORE_BYTES, **further)
        cluster.wait_for_nodes(START_S)
        (raylet,) = node.all_processes["raylet"]
        print(json.dumps({"raylet": raylet.process.pid, "address": cluster.address}), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
