"""Rows of repositories to repair: converted from SWE-bench, SWE-Gym and R2E, or made by breaking small packages."""
