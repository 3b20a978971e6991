"""Predictions of `penstock.simulator` next to measured runs, and the tables of docs/how/scale.md."""
