"""Fill L3 with documents before they are asked about.

    python examples/ingest.py [--url URL] [--api-key KEY] [--prefix-file FILE] DOCUMENT...

A server computes each document once, and HiCache writes its pages to L3. A document is a text file,
or a line of a .jsonl file: an object with ``text``, or with ``input_ids``. Questions find the pages
if they begin with the same text: the prefix, then the document. At the end the caches are flushed,
which needs an idle server: L3 has every page then. A document that L3 has is not computed again.
"""

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

ONE_TOKEN = {"temperature": 0.0, "max_new_tokens": 1}


def prompts(paths: list[Path], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each document, and its prompt as a request has it."""
    for path in paths:
        text = path.read_text("utf-8")
        if path.suffix != ".jsonl":
            yield str(path), {"text": prefix + text}
            continue
        for number, line in enumerate(text.splitlines(), 1):
            entry = json.loads(line)
            if "text" in entry:
                yield f"{path}:{number}", {"text": prefix + entry["text"]}
            elif prefix:
                sys.exit(f"{path}:{number}: a text cannot stand before input_ids")
            else:
                yield f"{path}:{number}", {"input_ids": entry["input_ids"]}


async def ingest(url: str, key: str | None, parallel: int, found: Any) -> Counter[str]:
    """Send all documents, then flush the caches; what the server refuses is named and counted."""
    counts = Counter(documents=0, refused=0, tokens=0, tokens_found_in_l3=0)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session:

        async def worker() -> None:
            for name, prompt in found:  # shared by all workers
                body = {**prompt, "sampling_params": ONE_TOKEN}
                async with session.post("/generate", json=body) as answer:
                    text = await answer.text()
                    meta = json.loads(text)["meta_info"] if answer.ok else {}
                    if not answer.ok or (meta["finish_reason"] or {}).get("type") == "abort":
                        print(f"{name}: {answer.status}: {text}", file=sys.stderr)
                        counts["refused"] += 1
                        continue
                storage = (meta.get("cached_tokens_details") or {}).get("storage") or 0
                counts.update(documents=1, tokens=meta["prompt_tokens"], tokens_found_in_l3=storage)

        await asyncio.gather(*(worker() for _ in range(parallel)))
        async with session.post("/flush_cache", params={"timeout": 120}, json={}) as answer:
            answer.raise_for_status()
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fill L3 with documents.")
    parser.add_argument("documents", nargs="+", type=Path, metavar="DOCUMENT")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    hidden = os.environ.get("HCACHE_API_KEY")  # other users see command lines
    parser.add_argument("--api-key", default=hidden, help="default: $HCACHE_API_KEY")
    parser.add_argument("--prefix-file", type=Path)
    parser.add_argument("--parallel", type=int, default=4)
    given = parser.parse_args()
    prefix = given.prefix_file.read_text("utf-8") if given.prefix_file else ""
    documents = prompts(given.documents, prefix)
    said = asyncio.run(ingest(given.url, given.api_key, given.parallel, documents))
    print(json.dumps(said))
    sys.exit(bool(said["refused"]))
