"""The loop `command`: any program, run in a box per episode, whose requests to its model are recorded."""
