#!/bin/bash
sed -i 's/long lines = 0$/long lines = 0;/' main.c
make
