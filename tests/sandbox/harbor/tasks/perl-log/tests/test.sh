#!/bin/bash
# The status of the checks is the reward.
if [ "$(perl top.pl)" = 10.0.0.7 ] && ! command -v python3; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
