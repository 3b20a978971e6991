"""The queue between rollout and training: tasks, leases, journals, trajectories, steps and versions.

types, queue          the data types and the protocol `TransferQueue`
admission             the admission and shipping inequalities; limits that cannot work
validation            checks of tasks and trajectories before they are sent
codec/                trajectories, journal entries and tasks as bytes
redis/, lua/          the queue in Redis or a Redis Cluster, its servers and access rights
archive/              trained batches on disk, in Parquet files with an index
metrics               `Status` for Prometheus; memory accounting; length deciles
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
