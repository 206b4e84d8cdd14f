"""Where tiny models are kept between test runs."""

from tests.cpu_engine.hcache_cpu_engine import cache_dir

MODELS = cache_dir() / "models"
"""Each under a name of its content."""
