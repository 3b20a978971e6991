"""One file per command of the `penstock` command line."""
