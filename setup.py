"""Which packages there are: pyproject.toml cannot find those of a folder with another name."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["hcache_backend", "hcache_backend.*"]),
        "hcache_kernels",
        *(f"hcache_kernels.{name}" for name in find_packages("kernels")),
    ],
    # The import name `kernels` belongs to a package that SGLang depends on.
    package_dir={"hcache_kernels": "kernels"},
)
