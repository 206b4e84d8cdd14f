"""What goes wrong with L3 while clients talk, one thing after the other."""

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from .ours import flip_bit, stored_pages

HELD = "held reads"
DISK = ("", "", "free", "slow reads", HELD, "failing reads", "failing writes")
"""As the server's faults `batches_in_step` and `disk` call it."""
PAGES = ("damaged", "cut off", "lost")


class Trouble:
    """Faults of a disk and of pages in it, drawn at random.

    Args:
        folder: Of the store.
        tell: Tells the server's faults `batches_in_step` and `disk` a text.
        stall_s: How long L3 hangs when it does.
        seed: Of what is drawn; when it happens depends on the machine.

    Attributes:
        counts: How often each happened.
    """

    def __init__(
        self, folder: Path, tell: Callable[[str], None], *, stall_s: float, seed: int = 0
    ) -> None:
        self._folder = folder
        self._tell = tell
        self._stall_s = stall_s
        self._dice = random.Random(seed)
        self.counts: Counter[str] = Counter()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(self._go_on, over)
            try:
                yield
            finally:
                over.set()
            going.result()

    def _go_on(self, over: threading.Event) -> None:
        dice = self._dice
        while not over.is_set():
            what = dice.choice(DISK + PAGES)
            self.counts[what or "in step"] += 1
            self._tell(what if what in DISK else "")
            if what in PAGES:
                self._spoil_a_page(what)
            over.wait(self._stall_s if what == HELD else dice.uniform(0.05, 0.5))
        self._tell("")

    def _spoil_a_page(self, how: str) -> None:
        pages = stored_pages(self._folder)
        if not pages:
            return
        page = self._dice.choice(pages)
        with suppress(FileNotFoundError):  # it was evicted just now
            size = page.stat().st_size
            if how == "lost":
                page.unlink()
            elif how == "cut off":
                os.truncate(page, self._dice.randrange(size))
            elif size:
                flip_bit(page, self._dice.randrange(size), self._dice.randrange(8))
