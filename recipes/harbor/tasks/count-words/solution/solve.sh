#!/bin/bash
echo 'wc -w' > count.sh
