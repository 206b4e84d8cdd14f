"""The list of statements that no test runs: what is in it stands in the source, with a reason."""

from collections import Counter

from tests.dark.report import MOST, Listed, statements


def test_what_is_listed_stands_in_the_source_and_is_little() -> None:
    listed, every = Listed.read(), statements()
    assert not list((listed.counts - every).elements())
    assert listed.counts.total() <= MOST * every.total()
    assert all(reason.endswith(".") and " " in reason for reason in listed.reasons.values())


def test_the_list_and_a_run_are_compared() -> None:
    one, two, rare = (("a.py", "f", text) for text in ("x()", "y()", "z()"))
    listed = Listed({one: "A reason.", rare: "A reason."}, Counter([one, one, rare]), {rare})
    assert listed.problems(Counter([one, one])) == []
    assert listed.problems(Counter([one, one, rare, two])) == ["dark, and not listed: a.py:f: y()"]
    assert listed.problems(Counter([one])) == ["listed, and not dark: a.py:f: x()"]
