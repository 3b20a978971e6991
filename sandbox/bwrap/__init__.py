"""Boxes made by bubblewrap: namespaces, cgroups, and a zygote that forks the first process of each box."""
