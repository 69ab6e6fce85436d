"""Recorded programs that cannot agree yet, each with the part of the package it waits for (see docs/status.md)."""

from __future__ import annotations

CATEGORIES = ("variables", "run", "reduce", "context", "xdev", "train", "data", "cluster")

WAITING = {
    "central storage": (
        "context.case_all_reduce_MEAN_central",
        "context.case_all_reduce_SUM_central",
        "context.case_matrix_central_storage_n2",
        "context.case_values_from_function_central_storage_n2",
        "data.case_central_n2",
        "reduce.case_extended_misc_central_storage_n2",
        "reduce.case_extended_reduce_central_storage_n2",
        "reduce.case_extended_update_central_storage_n2",
        "reduce.case_gather_central_n2",
        "reduce.case_grid_central_n2",
        "run.case_args_central_storage_n2",
        "run.case_ids_central_storage_n2",
        "run.case_local_results_central_storage_n2",
        "run.case_returns_central_storage_n2",
        "train.case_linreg_v1_sgd_central",
        "variables.case_matrix_central_AUTO_SUM",
        "variables.case_matrix_central_ON_READ_MEAN",
        "xdev.case_strategy_devices",
    ),
}
