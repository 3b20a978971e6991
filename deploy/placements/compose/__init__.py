"""A run in containers: `penstock compose init` makes a folder that `docker compose up` starts; see docs/compose.md."""
