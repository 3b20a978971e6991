"""A version as files: the format, deltas, and readers that check every byte. Imports nothing of the other rooms."""
