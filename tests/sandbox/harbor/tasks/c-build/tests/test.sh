#!/bin/bash
# The status of the checks is the reward.
if make >&2 && [ "$(printf 'a\nb\nc\n' | ./wc-lines)" = 3 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
