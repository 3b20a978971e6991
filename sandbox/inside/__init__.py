"""Programs inside a box: its first process and the interpreter it keeps. Standard library only, Python 3.9 on.

These modules are compiled by the box's own interpreter and handed in as one blob (`penstock.sandbox.bundle`); the
box needs no file of ours.
"""
