#!/bin/sh
set -e
cd /work
grep -rl gold /work/notes > /work/answer.txt
