"""L3 on local disks: pages by name, in any number of folders, one for each disk.

The parts, from the outside in: ``page_store`` puts pages on folders in turn (``cover``: which files
together have a page); ``volume`` is one folder while the server runs (``presence``: it may vanish
and come back; ``bounds``: what goes when it is full); ``folder`` is what is on the disk
(``index``); ``page_files`` writes, reads and deletes one page file (``format``, ``page_io``,
``file_ops``, ``kvikio_ops``); ``check`` compares files with the index; ``notes`` are what servers
leave beside the pages.
"""

from hcache_backend.store.file_ops import FileOps
from hcache_backend.store.folder import SERVER_REPORT, NotOurFolderError, is_store_folder
from hcache_backend.store.kvikio_ops import best_file_ops
from hcache_backend.store.notes import write_note
from hcache_backend.store.page_store import PageStore
from hcache_backend.store.stats import StoreStats

__all__ = [
    "SERVER_REPORT",
    "FileOps",
    "NotOurFolderError",
    "PageStore",
    "StoreStats",
    "best_file_ops",
    "is_store_folder",
    "write_note",
]
