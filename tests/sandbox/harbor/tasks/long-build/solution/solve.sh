#!/bin/bash
set -e
sh generate.sh
make
gcc -o sum main.c libsum.a
