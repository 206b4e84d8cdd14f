#!/usr/bin/env bash
# What a GPU should be asked next, with SGLang: bench/gpu/serve.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python}" -m bench.gpu.serve "$@"
