"""Dataset rows and the order in which they become tasks."""
