"""The house keeps to the sizes that docs/structure.md gives."""

from __future__ import annotations

import ast

from tests import house

MOST_LINES = 700  # of a file: it is one idea


def test_no_folder_has_more_lines_than_its_budget() -> None:
    budgets = house.budgets()
    lines = {folder: size.lines for folder, size in house.sizes(house.tree(), budgets).items()}
    assert {folder: n for folder, n in lines.items() if n > budgets[folder]} == {}


def test_every_folder_of_the_package_has_a_budget() -> None:
    folders = {path.rpartition("/")[0] for path, _ in house.tree()}
    package = {folder for folder in folders if folder.startswith(("hcache_backend", "kernels"))}
    budgets = house.budgets()
    parts = {f"kernels/codecs/{part}" for part in ("exp3", "exp4", "int8")}
    assert package - parts <= budgets.keys()


def test_no_file_is_longer_than_one_idea() -> None:
    lines = {path: len(text.splitlines()) for path, text in house.tree()}
    assert {path: n for path, n in lines.items() if n > MOST_LINES} == {}


# Parameters and attributes of type Any in each room, at most: lower one when it has fallen.
ANY = {
    "hcache_backend": 6,
    "hcache_backend/capture": 4,
    "hcache_backend/checks": 10,
    "hcache_backend/cli": 3,
    "hcache_backend/format": 1,
    "hcache_backend/host": 6,
    "hcache_backend/krul": 4,
    "hcache_backend/prefetch": 10,
    "hcache_backend/projection": 12,
    "hcache_backend/restore": 8,
    "hcache_backend/sglang": 152,
    "hcache_backend/start": 42,
    "hcache_backend/store": 1,
    "hcache_backend/tiers": 12,
    "kernels": 2,
    "kernels/codecs": 1,
}
# Names of what SGLang, torch, other libraries or JSON give. What is ours has a type, also in rooms
# below its own: hcache_backend/host/ports.py.
FOREIGN = """
    _ _cache _open _outcome _tree adapter allocator anchor args batch buffers cache components
    controller ctx decode_req device_indices device_pool draft engine_stream event forward_batch
    graphs host_indices host_pool host_pool_name index k kernel kind kv_pool kvcache kwargs
    mem_pool_host model node operation other params place q queue req request result
    runner scheduler server_args slots stream table token_ids tree updater v value weight_manager
"""


def test_no_room_hides_more_types_than_before() -> None:
    found = {room: size.any for room, size in house.sizes(house.tree(), house.budgets()).items()}
    package = {room: n for room, n in found.items() if f"{room}/".startswith(house.PACKAGE)}
    assert {room: n for room, n in package.items() if n > ANY.get(room, 0)} == {}


def test_no_object_of_ours_is_of_any_type() -> None:
    package = (text for path, text in house.tree() if path.startswith(house.PACKAGE))
    names = (name for text in package for name in house.names_of_any(ast.parse(text)))
    assert set(names) <= set(FOREIGN.split())


def test_verbs_can_be_searched() -> None:
    assert house.common_verbs(house.tree()) == {}


def test_verbs_of_one_protocol_or_base_class_count_once() -> None:
    texts = (
        "class Base:\n def run(self): ...\nclass Derived(Base):\n def run(self): ...\n",
        "class P(Protocol):\n def ask(self): ...\n def tell(self): ...\n",
        "class Has:\n def ask(self): ...\n def tell(self): ...\n def run(self): ...\n",
        "class Half:\n def ask(self): ...\n @property\n def tell(self): ...\n",
    )
    files = [(f"kernels/{number}.py", text) for number, text in enumerate(texts)]
    found = house.verbs([*files, ("tests/other.py", "class Other:\n def run(self): ...\n")])
    assert found == {"run": {"Base", "Has"}, "ask": {"P", "Half"}, "tell": {"P"}}
