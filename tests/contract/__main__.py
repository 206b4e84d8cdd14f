"""Writes what the package needs of SGLang to hcache_backend/contract/seams.json.

python -m tests.contract
"""

import json

from tests.contract.needs import ENGINE, SEAMS, needs_of

if __name__ == "__main__":
    SEAMS.write_text(json.dumps(needs_of(ENGINE), indent=1) + "\n")
