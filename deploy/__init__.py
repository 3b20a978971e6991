"""Starting, supervising and watching a run: the `penstock` command line."""
