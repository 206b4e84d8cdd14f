"""The two stages of saving hidden states (paper section 4.2.2) as one kernel each."""

from .operations import WRONG_STEP, StagedRows, save_rows, stage_rows

__all__ = ["WRONG_STEP", "StagedRows", "save_rows", "stage_rows"]
