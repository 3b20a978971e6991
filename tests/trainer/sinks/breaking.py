"""A sink of somebody's own, whose server goes away after the first step."""

from __future__ import annotations

from penstock.trainer.sinks import SinkJob


class Breaking:
    def __init__(self, job: SinkJob) -> None:
        self._told = job.run_dir / "told.txt"

    def rewind(self, step):
        self._told.write_text(f"from {step}\n")

    def step(self, version, metrics):
        with self._told.open("a") as file:
            file.write(f"version {version}\n")
        raise ConnectionError("the server went away")

    def evaluation(self, version, values):
        raise AssertionError("never called after a failure")

    def trajectories(self, step, records):
        assert records

    def close(self):
        raise AssertionError("never called after a failure")


def breaking(job: SinkJob) -> Breaking:
    return Breaking(job)
