"""The entry point by which stock vLLM finds our weight-transfer engine (group ``vllm.general_plugins``).

vLLM calls `register` in every process that it starts, so nothing heavy is imported until a worker asks for the engine.
"""

from __future__ import annotations

import contextlib

BACKEND = "penstock"
"""Name of the backend in ``--weight-transfer-config``."""
LOST = "lost: "
"""Begins what a worker says of a broadcast that it did not receive, or does not hold any more."""
BROKEN = "broken: "
"""Begins what a worker says of a broadcast in place that ended after it had begun to replace parameters."""
REFUSED = "the weights are refused: "
"""vLLM hands on the text of a worker's exception, not its type: with this in it nothing was touched."""


def register() -> None:
    """Make the backend known to vLLM. Calling it again in one process changes nothing."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # raised where the name is registered already
        WeightTransferEngineFactory.register_engine(
            BACKEND, "penstock.rollout_server.engines.vllm.worker", "FileWeightEngine"
        )
