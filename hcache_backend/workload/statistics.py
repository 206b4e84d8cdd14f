"""What a workload is like, in the paper's terms."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from hcache_backend.workload.base import Workload


def describe(workload: Workload) -> dict[str, Any]:
    """Counts and lengths, in tokens; what results keep about the workload that gave them."""
    turns = [turn for session in workload.sessions for turn in session.turns]
    asked = [session.document for session in workload.sessions if session.document is not None]
    contexts = [workload.documents[place] for place in asked]
    return {
        "name": workload.name,
        "sessions": len(workload.sessions),
        "requests": workload.requests,
        "rounds_median": median(len(session.turns) for session in workload.sessions),
        "prompt_mean": mean(turn.prompt for turn in turns),
        "output_mean": mean(turn.output for turn in turns),
        "history_median": median(map(workload.history, workload.sessions)),
        "history_max": workload.longest,
        "documents": len(workload.documents),
        "documents_asked": len(set(asked)),
        "context_mean": mean(contexts) if contexts else 0.0,
        "arrivals": workload.arrivals,
        "interval_s": workload.interval_s,
        "seed": workload.seed,
    }
