"""The part of docs/limits.md that is printed from the product's table of capabilities."""

from hcache_backend.start.capabilities import CAPABILITIES

FIRST, LAST = "<!-- capabilities: written by `python -m tests.docs --write` -->", "<!-- end -->"


def table() -> str:
    """A row for each need: the server's feature, the capabilities that it rules out, the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for capability, needs in CAPABILITIES.items():
        for need in needs:
            found.setdefault((need.feature, need.reason), []).append(capability)
    rows = ["| a server with | goes without | the log says |", "|---|---|---|"]
    for (feature, reason), capabilities in found.items():
        rows.append(f"| {feature} | {', '.join(capabilities)} | {reason.replace('{}', '...')} |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """A page with the table as it is now."""
    before, _, rest = text.partition(FIRST)
    _, _, after = rest.partition(LAST)
    return f"{before}{FIRST}\n{table()}\n{LAST}{after}"
