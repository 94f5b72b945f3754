#!/bin/sh
set -e
cd /work
mkdir -p /work/black
cp /work/mirror.txt /work/black/
