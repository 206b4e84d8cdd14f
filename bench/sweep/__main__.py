"""Restores on a real server over a bus, or from an L3, that is made slower and slower.

SGLang serves a random Llama on the CPU, with a prompt whose pages are in L3 and nowhere else. Every
method has a server; they take turns at each rate, the others stopped meanwhile. One rate is found
by measuring: at the balanced rate what is stored takes as long to transfer as to restore.

- ``partition``: copies to the device are slowed down. All layers from hidden states, all from K and
  V, all recomputed, and the automatic partition, which goes by a profile of this machine with the
  rate for its bus. Timed is the load, from its launch to the last layer in the pool.
- ``eager``: reads of page files are slowed down. Hidden states restored while L3 is being read, the
  same pages restored after it was read, and K and V. Timed from the start of the prefetch on.
- ``eager_kv``: the same for a model with grouped-query attention, over a slow bus: own pages of K
  and V restored while L3 is being read, after that, and by SGLang's `file` backend.

Times are medians. At the balanced rate another request generates meanwhile, too: its time between
tokens, as many whatever is restored, from the moment on at which the prompt was sent. So the time
in which the engine computes only the prompt's last token counts wherever it falls.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from bench.harness.machine import MachineError, find_machine
from bench.harness.program import failing, parser, stamp
from bench.harness.report import OUT, write
from bench.sweep.plans import SWEEPS
from bench.sweep.report import draw, table_lines
from bench.sweep.run import run


def main() -> None:
    parsed = parser("bench.sweep", __doc__, "partition|eager|eager_kv [options]")
    parsed.add_argument("sweep", choices=SWEEPS)
    parsed.add_argument("--rates", type=float, nargs="+", help="MB/s; 0: no limit")
    parsed.add_argument("--rounds", type=int, help="restores by each server and rate")
    parsed.add_argument("--tokens", type=int, help="tokens of a restore")
    parsed.add_argument("--out", type=Path, default=OUT, help="folder for SWEEP.json and SWEEP.png")
    options = vars(parsed.parse_args())
    name, out = options.pop("sweep"), options.pop("out")
    sweep = replace(SWEEPS[name], **{key: value for key, value in options.items() if value})
    with failing():
        machine = find_machine()
        if machine.device != "cpu":
            raise MachineError("this slows the CPU engine down; see bench/gpu/ for GPUs")
        results = {
            "sweep": name,
            **stamp(machine),
            "cores": os.cpu_count(),
            "model": sweep.shape.describe(),
            "tokens": sweep.tokens,
            **run(sweep, machine),
        }
    print(table_lines(results))
    write(out, name, results, draw)


if __name__ == "__main__":
    main()
