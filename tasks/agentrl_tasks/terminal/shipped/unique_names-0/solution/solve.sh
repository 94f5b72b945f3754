#!/bin/sh
set -e
cd /work
cut -d ' ' -f 2 /work/visits.log | sort -u > /work/users.txt
