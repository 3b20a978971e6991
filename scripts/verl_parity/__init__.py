"""Our algorithms beside verl's own functions: verl pads, we do not, and the numbers must be the same."""
