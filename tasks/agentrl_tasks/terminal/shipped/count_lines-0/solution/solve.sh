#!/bin/sh
set -e
cd /work
grep -c ERROR /work/cup.log > /work/answer.txt
