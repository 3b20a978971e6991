import os

with open("/app/count.txt") as file:
    assert file.read().strip() == os.environ["EXPECTED"]
