#!/bin/bash
# The status of the checks is the reward.
if [ $(ls parts/*.o | wc -l) = 60 ] && [ "$(./sum)" = "$(python3 /tests/expected.py)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
