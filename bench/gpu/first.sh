#!/usr/bin/env bash
# The first script for a GPU, without SGLang: bench/gpu/first.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-$(command -v python || command -v python3)}" -m bench.gpu.first "$@"
