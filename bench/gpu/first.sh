#!/usr/bin/env bash
# What a GPU should be asked first, without SGLang: bench/gpu/first.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python}" -m bench.gpu.first "$@"
