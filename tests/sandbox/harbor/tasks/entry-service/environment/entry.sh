#!/bin/sh
nohup python3 /opt/counter.py "$COUNTER_START" >/opt/counter.log 2>&1 &
exec "$@"
