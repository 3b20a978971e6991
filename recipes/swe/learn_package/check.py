"""Calls each function with a few examples; prints the first that is wrong, and ends with status 1 then.

python3 -B check.py
"""

import sys
from importlib import import_module

EXAMPLES = {
    "change": [((7, 2), 5)],
    "cheaper": [((2, 3), True), ((3, 3), False)],
    "cost": [((7, 2), 14)],
    "dozens": [((2,), 24)],
    "enough": [((4, 3), True), ((3, 3), True)],
    "fits": [((2, 3), True), ((3, 3), True)],
    "share": [((7, 2), 3)],
    "total": [((7, 2), 9)],
}


def main():
    for name in EXAMPLES:
        line = complaint(name, getattr(import_module(name), name))
        if line:
            sys.exit(line)
    print("all examples hold")


def complaint(name, function):
    """The first example that this function does not meet; None if it meets all."""
    for arguments, expected in EXAMPLES[name]:
        found = function(*arguments)
        if found != expected:
            return f"{name}({', '.join(map(str, arguments))}) is {found}, not {expected}"
    return None


if __name__ == "__main__":
    main()
