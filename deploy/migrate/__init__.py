"""Conversion of other frameworks' settings to a recipe: names as data (`names/`), computed values as rules."""
