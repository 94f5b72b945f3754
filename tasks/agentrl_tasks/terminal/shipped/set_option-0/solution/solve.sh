#!/bin/sh
set -e
cd /work
sed -i 's/^limit = .*/limit = 2724/' /work/table.conf
