"""A run on this machine and others: its plan, roles, supervision, connection, records and reports."""
