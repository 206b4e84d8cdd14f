"""The list of statements that no test runs: what is in it stands in the source, with a reason."""

from tests.dark.report import MOST, Listed, statements


def test_what_is_listed_stands_in_the_source_and_is_little() -> None:
    listed, every = Listed.read(), statements()
    assert not list((listed.counts - every).elements())
    assert listed.counts.total() <= MOST * every.total()
    assert all(reason.endswith(".") and " " in reason for reason in listed.reasons.values())
