#!/bin/sh
# Sixty sources with two hundred functions each.
mkdir -p parts
for part in $(seq 60); do
  for number in $(seq 200); do
    printf 'long part_%s_%s(long x) { long y = x; for (int i = 0; i < %s; i++) y = (y * 31 + i) %% 1009; return y; }\n' "$part" "$number" "$number"
  done >"parts/part_$part.c"
done
