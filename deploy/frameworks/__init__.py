"""Names of other frameworks' settings and ours, as data (`names/`): for conversions, and answers to unknown settings."""
