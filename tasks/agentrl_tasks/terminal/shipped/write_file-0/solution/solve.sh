#!/bin/sh
set -e
cd /work
echo 'pink garden 22' > /work/oven.txt
