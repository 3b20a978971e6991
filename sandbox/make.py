"""Makes a sandbox from settings. No fallback: the configured backend runs, or an error says why not."""

from __future__ import annotations

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.managed.api import PROVIDERS
from penstock.sandbox.protocol import ForkableSandbox, SandboxError


def make_sandbox(
    config: SandboxConfig,
    owner: str,
    token: str | None = None,
    episode_deadline_s: float | None = None,
    run: str = "",
) -> ForkableSandbox:
    """The sandbox that `config.backend` names.

    Args:
        owner: names the run; what a killed process of the same owner left is cleared away.
        token: of the sandbox server, for backend ``remote``.
        episode_deadline_s: of the episodes that will use it: a remote session is ended by the server after this time
            without use, and some headroom; a provider ends a box at this age, and some headroom.
        run: name of the run that `owner` belongs to: a provider's boxes are the run's, whichever worker asked.

    Raises:
        SandboxError: it cannot work here; the message names the fix.
    """
    if config.backend == "bwrap":
        from penstock.sandbox.bwrap.sandbox import BwrapSandbox

        return BwrapSandbox(config, owner)
    if config.backend == "remote":
        from penstock.sandbox.remote import RemoteSandbox, ttl_of

        if config.url is None:
            raise SandboxError("sandbox.backend is remote: set sandbox.url to a `penstock sandbox` server")
        if not token:
            raise SandboxError("sandbox.backend is remote: its server's token is needed (the run's: PENSTOCK_TOKEN)")
        return RemoteSandbox(config, config.url, token, ttl_of(episode_deadline_s))
    if config.backend == "docker":
        from penstock.sandbox.docker.sandbox import DockerSandbox

        return DockerSandbox(config, owner)
    if config.backend in PROVIDERS:
        from penstock.sandbox.managed.sandbox import ManagedSandbox

        return ManagedSandbox(config, run or owner, episode_deadline_s)
    from penstock.sandbox.unsafe_subprocess import UnsafeSubprocessSandbox

    return UnsafeSubprocessSandbox(config)
