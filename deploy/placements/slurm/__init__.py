"""Runs under Slurm: one readable batch script for a run, one for what joins it later."""
