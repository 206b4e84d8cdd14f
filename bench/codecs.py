"""The cost of each codec of hidden states: bytes, and changes in the model's output.

A server without a cache holds conversations about Python source that a fixture model
(bench/fixtures) has not seen. Replies are drawn by their likelihood, because the likeliest
replies soon repeat themselves. Every codec's server then gets the same texts, turn by turn: the
history of each comes back from L3, and question and reply behind it are computed. The model's
scores of the reply's tokens are compared with those of the server without a cache, which computes
the whole text, and with those of codec `none`. The row `decoded` is the first server's own replies
against that: the effect of rounding alone, one token at a time and all at once.

Bytes per token are those of the page files.

The fixture model has no channels that stand out. Large models have such channels, and `int8` loses
most on them; so the error of K is computed for synthetic hidden states that have some.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.fixtures.models import chosen
from bench.fixtures.smollm2 import FORMS
from bench.fixtures.text import Texts, corpus, encoder
from bench.fixtures.train import RECIPES
from bench.harness.methods import METHODS, PAGE_SIZE, server_options
from bench.harness.program import Advance, Program, Run, Setting, at_least, names, scratch, steps
from bench.harness.reference import Scores, agreement
from bench.harness.report import Picture, Results, Series, Table
from bench.harness.restorer import page_files
from bench.harness.server import Server
from hcache_backend.server_report import read_report
from hcache_kernels.codecs import make_codec

CODECS = {"float32": ("none", "int8"), "bfloat16": ("none", "exp4", "int8")}
"""Codecs by the type that the model is served in; the first one changes no value."""
UNCODED = "none"
_POOL_TOKENS = 4096
_STANDING_OUT = (1, 5, 10, 20, 50, 100)
_WIDTH, _CHANNELS, _TOKENS, _K_VALUES = 4096, 4, 64, 256
_SCRIPT = ("conversations", "turns", "question_tokens", "reply_tokens")
Row = dict[str, Any]


class Turn(NamedTuple):
    """A turn of a conversation that the server without a cache held.

    Attributes:
        ids: History, question and reply.
        history: Tokens of the history; 0 in a first turn.
        start: Place of the reply's first token.
    """

    ids: list[int]
    history: int
    start: int


def measure(run: Run) -> Results:
    """Run every server.

    Raises:
        ServerError: A server did not start, a request failed, or a history did not come back.
    """
    given = run.given
    longest = given.turns * (given.question_tokens + given.reply_tokens)
    if longest > _POOL_TOKENS:
        run.parser.error(
            f"--turns {given.turns} make conversations of {longest} tokens; at most "
            f"{_POOL_TOKENS} fit into the KV pool"
        )
    model = chosen(given.model, quick=given.quick)
    servers = sum(len(CODECS[dtype]) for dtype in given.dtypes) + 2 * len(given.dtypes)
    texts = Texts(encoder(Path(model.path)), corpus().held_out)
    with steps(servers * given.conversations * given.turns) as advance, scratch() as folder:
        serve = _Servers(run, Path(model.path), Path(folder), advance)
        rows = [row for dtype in given.dtypes for row in _rows(serve, texts, dtype)]
    return {
        "attention_backend": run.machine.exact_attention,
        "name": model.name,
        "model": model.about,
        **{name: getattr(given, name) for name in _SCRIPT},
        "codecs": rows,
        "standing_out": [standing_out(times) for times in _STANDING_OUT],
    }


def standing_out(times: float) -> Row:
    """The error of K by ``int8``, if 4 of 4,096 channels are ``times`` as large as others.

    Hidden states are normal values in bfloat16, K is one random matrix product behind an RMSNorm
    whose weight makes all channels alike, as trained ones do. Errors are relative to the norm of K.
    """
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(_WIDTH, _K_VALUES, generator=source) / _WIDTH**0.5
    rows = torch.randn(_TOKENS, _WIDTH, generator=source)
    rows[:, :_CHANNELS] *= times
    weight[:_CHANNELS] /= times
    rows = rows.bfloat16()

    def project(states: torch.Tensor) -> torch.Tensor:
        values = states.float()
        return values / values.square().mean(1, keepdim=True).sqrt() @ weight

    k, codec = project(rows), make_codec("int8", _WIDTH, rows.dtype)
    off = project(codec.decode(codec.encode(rows)[0])) - k
    return {"times": times, "int8": float(off.norm() / k.norm())}


def _rows(serve: _Servers, texts: Texts, dtype: str) -> Iterator[Row]:
    """Replies of the server without a cache, then one row per codec."""
    turns, decoded, exact = serve.reference(texts, dtype)
    yield {"codec": "decoded", "dtype": dtype, "as_recomputed": compared("decoded", decoded, exact)}
    found: dict[str, tuple[Scores, float]] = {}
    for codec in CODECS[dtype]:
        restored = serve.restored(turns, dtype, codec)
        if restored is None:
            yield {"codec": codec, "dtype": dtype, "refused": True}
            continue
        scores, stored, projection = restored
        found[codec] = scores, stored
        uncoded, most = found[UNCODED]
        coded = codec != UNCODED
        yield {
            "codec": codec,
            "dtype": dtype,
            "stored_bytes_per_token": stored,
            "share_of_uncoded": stored / most if coded else None,
            "projection": projection,
            "as_recomputed": compared(codec, scores, exact),
            "as_uncoded": compared(codec, scores, uncoded) if coded else None,
        }


def compared(row: str, scores: Scores, reference: Scores) -> Row:
    return asdict(agreement(row, scores, reference))


class _Servers:
    def __init__(self, run: Run, model: Path, folder: Path, advance: Advance) -> None:
        self._machine, self._given = run.machine, run.given
        self._model, self._folder, self._advance = model, folder, advance

    def _server(self, method: str, folder: Path, dtype: str, **hcache: str) -> Server:
        options = server_options(
            *(METHODS[method], self._machine, self._model, folder),
            pool_tokens=_POOL_TOKENS,
            hcache=hcache,
            dtype=dtype,
            attention_backend=self._machine.exact_attention,
        )
        return Server(options)

    def reference(self, texts: Texts, dtype: str) -> tuple[Sequence[Turn], Scores, Scores]:
        """Conversations held without a cache, and two scores of the replies behind a history:
        as the server decoded them, and as it computes whole texts."""
        given, turns, decoded, whole = self._given, [], Scores(), Scores()
        with self._server("recompute", self._folder / f"reference-{dtype}", dtype) as server:
            for conversation in range(given.conversations):
                ids: list[int] = []
                for number in range(given.turns):
                    self._advance(f"no cache, {dtype}: conversation {conversation + 1}")
                    source, history = random.Random(f"{conversation}/{number}"), len(ids)
                    asked = texts.draw(source, given.question_tokens, keys=4, gap=16).ids
                    ids = [*ids, *asked]
                    reply = server.generate(ids, given.reply_tokens, logprobs=True, temperature=1.0)
                    turn = Turn([*ids, *reply.output_ids], history, len(ids))
                    ids = turn.ids
                    turns.append(turn)
                    self._advance(f"no cache, {dtype}: the same text at once")
                    if history:
                        said = reply.meta_info
                        top = [found[0][1] for found in said["output_top_logprobs"]]
                        decoded.add(top, [found[0] for found in said["output_token_logprobs"]])
                        whole.add(*server.score(turn.ids, turn.start)[:2])
        return turns, decoded, whole

    def restored(
        self, turns: Sequence[Turn], dtype: str, codec: str
    ) -> tuple[Scores, float, list[Row]] | None:
        """Scores of the replies behind restored histories, bytes per token of the pages, and the
        projections in the server's report: how, and how exactly without a codec.

        None: the server does not use the codec, because it changes K or V of this model too much.
        """
        folder, scores = self._folder / f"{codec}-{dtype}", Scores()
        with self._server("hcache-hidden", folder, dtype, codec=codec) as server:
            if f"codec {codec}" not in server.log_text():
                return None
            for number, turn in enumerate(turns):
                self._advance(f"codec {codec}, {dtype}: turn {number + 1}")
                best, logprobs, from_l3 = server.score(turn.ids, turn.start)
                if from_l3 <= turn.history - PAGE_SIZE:
                    # A history that was computed again would say nothing about the codec.
                    missed = f"{from_l3} of {turn.history} tokens of a history came from L3"
                    raise server.error(missed)
                if turn.history:
                    scores.add(best, logprobs)
                server.flush_cache()
        pages, report = page_files(folder / "l3"), read_report(folder / "l3")
        if report is None:
            raise server.error("it left no report")
        size = sum(path.stat().st_size for path in pages)
        projection = [group.model_dump(mode="json") for group in report.projection]
        return scores, size / (PAGE_SIZE * len(pages)), projection


def shown(results: Results) -> list[Row]:
    return [
        {
            **row,
            "name": row["codec"] if row["codec"] == "decoded" else f"`{row['codec']}`",
            "computed": "refused at start" if "refused" in row else _same(row["as_recomputed"]),
            "computed_off": _off(row.get("as_recomputed")),
            "uncoded": _same(row.get("as_uncoded")),
            "uncoded_off": _off(row.get("as_uncoded")),
        }
        for row in results["codecs"]
    ]


def _same(found: Mapping[str, Any] | None) -> str | None:
    return None if found is None else f"{found['same']:,} of {found['tokens']:,}"


def _off(found: Mapping[str, Any] | None) -> str | None:
    """Mean (largest) difference of log-probabilities."""
    if found is None:
        return None
    return f"{found['mean_difference']:.2g} ({found['largest_difference']:.2g})"


def panels(results: Results) -> dict[str, list[Row]]:
    """Other tokens than without a cache by codec, in percent, a panel for each type."""
    rounding = {r["dtype"]: _changed(r) for r in results["codecs"] if r["codec"] == "decoded"}
    found: dict[str, list[Row]] = {}
    for row in results["codecs"]:
        if "stored_bytes_per_token" in row:
            one = {row["codec"]: _changed(row), "decoded": rounding.get(row["dtype"])}
            bytes_ = row["stored_bytes_per_token"]
            found.setdefault(row["dtype"], []).append({"bytes": bytes_, **one})
    return found


def finding(results: Results) -> str:
    said = [
        f"{row['codec']} stores {row['share_of_uncoded']:.2f} of the bytes and changes "
        f"{_changed(row):.1f}% of tokens"
        for row in results["codecs"]
        if row["dtype"] == "bfloat16" and row.get("share_of_uncoded")
    ]
    return "; ".join(said)


def _changed(row: Row) -> float:
    """Tokens that differ from those without a cache, in percent."""
    exact = row["as_recomputed"]
    return 100 * (1 - exact["same"] / exact["tokens"])


PROGRAM = Program(
    name="codecs",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--model", str, "gqa", "fixture model", {"choices": [*RECIPES, *FORMS]}),
        Setting("--quick", None, False, "the fixture that is trained in a minute"),
        Setting("--dtypes", names(list(CODECS)), ",".join(CODECS), "types of the model"),
        Setting("--conversations", at_least(1), 8, "conversations held"),
        Setting("--turns", at_least(2), 4, "turns of each conversation"),
        Setting("--question-tokens", at_least(1), 60, "tokens of each question"),
        Setting("--reply-tokens", at_least(1), 64, "tokens of each reply"),
    ),
    tables=(
        Table(
            shown,
            "codec = name | in = dtype | bytes per token = stored_bytes_per_token :,.0f | "
            "of uncoded = share_of_uncoded | same token as without a cache = computed | "
            "log-probability off by = computed_off | same token as uncoded = uncoded | "
            "off by = uncoded_off",
        ),
        Table(
            "standing_out",
            "4 of 4,096 channels so many times as large = times | error of K by `int8` = int8 :.1%",
        ),
    ),
    draw=Picture(
        title=finding,
        panels=panels,
        x="bytes",
        x_label="bytes per token",
        y_label="other tokens than without a cache, %",
        series=(
            *(Series(name, name, name, "o") for name in ("none", "exp4", "int8")),
            Series("rounding alone: decoded token by token", "decoded", "computed", ":"),
        ),
    ),
    file=lambda results: "codecs" if results["name"] == "gqa" else f"codecs_{results['name']}",
)

if __name__ == "__main__":
    PROGRAM.run()
