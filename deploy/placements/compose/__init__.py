"""A run in containers: `penstock compose init` makes a folder for `docker compose up`; see docs/guide/cluster.md."""
