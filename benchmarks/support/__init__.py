"""What several benchmarks share. Modules named `*_side` and `*_child` run as processes of their own."""
