"""Boxes for code that nobody trusts."""
