"""A run as a trace for Perfetto or Chrome: what every role did, when (`penstock trace`)."""
