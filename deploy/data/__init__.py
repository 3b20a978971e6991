"""Data sets with verl's columns, made without a download or from files that a user has: `penstock data ...`."""
