"""Names of verl's settings and ours, as data (`names/`): for conversions and for unknown settings."""
