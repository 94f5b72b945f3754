#!/bin/sh
set -e
cd /work
awk -F, 'NR > 1 { s += $2 } END { print s }' /work/garden.csv > /work/answer.txt
