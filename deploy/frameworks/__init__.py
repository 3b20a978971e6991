"""Names of other frameworks' settings and ours, as data (`names/`): for conversions and for unknown settings."""
