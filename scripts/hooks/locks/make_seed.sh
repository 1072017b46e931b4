#!/usr/bin/env bash
# Lock anew what `kimisession seed` needs on a machine that is rented for it: our own dependencies and the client of Cloud
# Storage, on Linux x86-64 and Python 3.12, every wheel with its SHA-256. A developer's tool (uv); machines only read.
set -euo pipefail
cd "$(dirname "$0")"
{
    echo "# Seeding on Linux x86-64, Python 3.12. Made by: scripts/hooks/locks/make_seed.sh"
    uv pip compile ../../../pyproject.toml - --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
        --only-binary :all: --generate-hashes --no-emit-index-url --no-annotate --no-header -q <<<'google-cloud-storage>=3.4'
} >seed.lock.part
mv seed.lock.part seed.lock
