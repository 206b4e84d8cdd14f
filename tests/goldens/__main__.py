"""Records what the tests of this folder compare. To be run on purpose: read the difference.

python -m tests.goldens [arguments of pytest]
"""

import os
import sys
from pathlib import Path

import pytest

from tests.goldens.golden import RECORD

if __name__ == "__main__":
    os.environ[RECORD] = "1"
    sys.exit(pytest.main([str(Path(__file__).parent), *sys.argv[1:]]))
