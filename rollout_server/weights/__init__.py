"""Policy weights on their way from the trainer to rollout servers: manifests, checksums, transports."""

from penstock.rollout_server.weights.file import NoSpace, WeightPublisher, read_verified
from penstock.rollout_server.weights.manifest import build_manifest, checksum, verify_tensors

__all__ = ["NoSpace", "WeightPublisher", "build_manifest", "checksum", "read_verified", "verify_tensors"]
