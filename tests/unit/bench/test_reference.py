"""No row of results is compared with itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.codecs import compared, standing_out
from bench.harness.reference import Agreement, OwnReference, Scores, agreement, reference_of


def test_a_row_whose_reference_is_itself_is_refused_by_name() -> None:
    run = Scores([1], [0.0])
    with pytest.raises(OwnReference, match="row 'exp4' is the row's own run"):
        reference_of("exp4", run, run)


def test_another_run_with_the_same_results_is_a_reference() -> None:
    run = Scores([1], [0.0])
    assert reference_of("exp4", run, again := replace(run)) is again


def test_agreement_counts_tokens_and_measures_log_probabilities() -> None:
    run, reference = (
        Scores([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0]),
        Scores([1, 2, 3, 5], [-1.0] * 4),
    )
    assert agreement("int8", run, reference) == Agreement(4, 3, 1.5, 3.0)


def test_scores_of_other_texts_are_no_reference() -> None:
    with pytest.raises(ValueError, match="shorter"):
        agreement("int8", Scores([1, 2], [0.0, 0.0]), Scores([1], [0.0]))


def test_the_codec_table_refuses_a_codec_beside_itself() -> None:
    scores = Scores([1], [0.0])
    with pytest.raises(OwnReference, match="'none'"):
        compared("none", scores, scores)


def test_int8_loses_less_than_fp8_until_some_channels_stand_out() -> None:
    alike, unlike = standing_out(1), standing_out(50)

    assert alike["int8"] < alike["fp8"] / 2
    assert unlike["fp8"] < unlike["int8"] / 2
