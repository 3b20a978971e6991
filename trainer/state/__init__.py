"""The files of a run: checkpoints and records."""
