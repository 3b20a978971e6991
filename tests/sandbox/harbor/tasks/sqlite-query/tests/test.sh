#!/bin/bash
# The status of the checks is the reward.
if [ "$(sqlite3 shop.db < query.sql)" = "$(printf 'Ada|11\nCyd|10')" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
