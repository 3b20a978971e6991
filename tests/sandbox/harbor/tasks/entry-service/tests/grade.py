import json
import sys


def read(path):
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return -1


first, found = read("/app/first.txt"), read("/app/sum.txt")
right = first >= 40 and found == 3 * first + 3
print(json.dumps({"reward": float(right and sys.argv[1] == "counting"), "has_sum": int(found >= 0)}))
