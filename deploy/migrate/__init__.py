"""From other frameworks' settings to a recipe: names as data (`names/`), what must be computed as rules."""
