#!/bin/bash
if python3 /tests/check.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
