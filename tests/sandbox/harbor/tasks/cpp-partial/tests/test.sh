#!/bin/bash
compiles=0 right=0
if g++ -std=c++17 -O1 -o /tmp/primes primes.cpp; then
  compiles=1
  [ "$(/tmp/primes 20 | tr '\n' ' ')" = "2 3 5 7 11 13 17 19 " ] && right=1
fi
python3 -c 'import json, sys; print(json.dumps({"reward": (int(sys.argv[1]) + int(sys.argv[2])) / 2}))' $compiles $right > /logs/verifier/reward.json
