"""The token that opens metrics alone, so that a monitor need not hold the run's."""

from __future__ import annotations

import hmac


def metrics_token(run_token: str) -> str:
    """Made from the run's token, so that every role knows it without being told; the run's cannot be made from it."""
    return hmac.digest(run_token.encode(), b"penstock: metrics alone", "sha256").hex()
