"""Servers that score given tokens: a reward model and a teacher."""
