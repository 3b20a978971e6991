#!/bin/bash
a=$(python3 /opt/ask.py) b=$(python3 /opt/ask.py) c=$(python3 /opt/ask.py)
echo $((a + b + c)) > sum.txt
echo "$a" > first.txt
