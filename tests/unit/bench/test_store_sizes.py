"""The page store is measured with pages of the sizes that servers write."""

import json
from pathlib import Path

from typer.testing import CliRunner

from bench.store import __main__ as store
from hcache_backend.cli.main import app


def test_pages_are_as_large_as_hcache_size_says(tmp_path: Path) -> None:
    layouts = store.layouts(store.RANKS, tmp_path)
    assert sorted(name for models in layouts.values() for name in models) == sorted(store.RANKS)
    assert len(store.RANKS) == 10
    for layout, models in layouts.items():
        for name in models:
            asked = ["size", str(tmp_path / f"{name}.json"), "--json", "--tokens", "64"]
            ranks = ["--tp", str(store.RANKS[name]), "--conversations", "1"]
            done = CliRunner().invoke(app, [*asked, *ranks])
            assert json.loads(done.output)["page_bytes"] == layout.page_bytes


def test_ratios_are_medians_of_rounds_and_spans_their_ends() -> None:
    pages = {"models": ["Llama-3.1-8B"], "bytes": 6 << 20, "copied": {}, "gil": {}}
    speeds = {"ceiling": [100.0, 200.0, 400.0], "store": [90.0, 100.0, 400.0]}
    found = {"pages": [{**pages, "read": speeds, "write": speeds}]}
    assert store.ratios(found, "read", "ceiling") == [0.9]
    assert store.span([0.5, 0.904, 0.9]) == "0.50 to 0.90" and store.span([1, 1.001]) == "1.00"
