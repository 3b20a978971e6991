#!/bin/bash
python3 /tests/grade.py "$COUNTER_NOTE" > /logs/verifier/reward.json
