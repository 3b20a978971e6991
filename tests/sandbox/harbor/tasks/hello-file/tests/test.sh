#!/bin/bash
# The status of the checks is the reward.
if [ "$(cat hello.txt 2>/dev/null)" = hello ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
