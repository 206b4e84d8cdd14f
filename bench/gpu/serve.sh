#!/usr/bin/env bash
# The second script for a GPU, with SGLang: bench/gpu/serve.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-$(command -v python || command -v python3)}" -m bench.gpu.serve "$@"
