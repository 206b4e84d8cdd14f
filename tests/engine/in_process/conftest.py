"""These tests import SGLang, so they run in an interpreter of their own, started by
tests/engine/test_in_process.py: its stand-ins for a plain CPU must not reach other tests."""

import os

collect_ignore_glob = [] if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" else ["*.py"]
