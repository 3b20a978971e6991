"""Checks before a run costs anything: `penstock run` refuses a recipe that fails them, `penstock doctor` runs all."""
