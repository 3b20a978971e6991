#!/bin/bash
# The status of the checks is the reward.
number() { printf '%s' "$1" | sh count.sh | tr -d '[:space:]'; }
if [ -f count.sh ] && [ "$(number 'one two  three')" = 3 ] && [ "$(number '')" = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
