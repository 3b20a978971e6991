"""From settings to a sandbox. There is no falling back: what was asked for is what runs, or an error says why not."""

from __future__ import annotations

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.protocol import Sandbox, SandboxError


def make_sandbox(config: SandboxConfig, owner: str, token: str | None = None) -> Sandbox:
    """The sandbox that `config.backend` names.

    Args:
        owner: names the run; what a killed process of the same owner left is cleared away.
        token: of the sandbox server, for backend ``remote``.

    Raises:
        SandboxError: it cannot work here; the text names the mend.
    """
    if config.backend == "bwrap":
        from penstock.sandbox.bwrap import BwrapSandbox

        return BwrapSandbox(config, owner)
    if config.backend == "remote":
        return _remote(config, token)
    if config.backend == "docker":
        from penstock.sandbox.docker.sandbox import DockerSandbox

        return DockerSandbox(config, owner)
    from penstock.sandbox.unsafe_subprocess import UnsafeSubprocessSandbox

    return UnsafeSubprocessSandbox(config)


def _remote(config: SandboxConfig, token: str | None) -> Sandbox:
    from penstock.sandbox.remote import RemoteSandbox

    if config.url is None:
        raise SandboxError("sandbox.backend is remote: set sandbox.url to a `penstock sandbox` server")
    if not token:
        raise SandboxError("sandbox.backend is remote: its server's token is needed (the run token)")
    return RemoteSandbox(config, config.url, token)
