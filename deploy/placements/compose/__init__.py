"""A run in containers: `penstock compose init` makes a folder that `docker compose up` starts; see docs/guide/cluster.md."""
