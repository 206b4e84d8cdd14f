"""The front and the back of a prefetch: what each may take. Their interleavings are in
tests/engine/in_process/hits/test_meetings.py."""

import threading

from hcache_backend.prefetch.prefetch import Meeting


def test_a_reader_takes_nothing_while_ranks_agree_on_what_the_front_takes() -> None:
    meeting, tries = Meeting(), list[range]()
    meeting.begin(4)
    reader = threading.Thread(target=lambda: tries.append(meeting.next_batch(4)))

    room = meeting.offer()
    reader.start()
    reader.join(0.05)
    assert not tries
    assert meeting.take(room - 1) == range(3)
    reader.join()
    assert tries == [range(3, 4)]


def test_both_sides_may_say_how_many_pages_there_are() -> None:
    meeting = Meeting()
    meeting.begin(5)
    assert meeting.next_batch(3) == range(2, 5)
    meeting.begin(5)
    assert meeting.next_batch(3) == range(2)
    assert not meeting.next_batch(3) and not meeting.take(meeting.offer())
