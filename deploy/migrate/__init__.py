"""Conversion of other frameworks' settings to a recipe: names of `frameworks`, computed values as rules."""
