#!/bin/bash
python3 "$TEST_DIR/check.py"
