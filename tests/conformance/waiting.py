"""Recorded programs that cannot agree yet, each with the part of the package it waits for (see docs/status.md)."""

from __future__ import annotations

CATEGORIES = ("variables", "run", "reduce", "context", "xdev", "train")

WAITING = {
    "central storage": (
        "context.case_all_reduce_MEAN_central",
        "context.case_all_reduce_SUM_central",
        "context.case_matrix_central_storage_n2",
        "context.case_values_from_function_central_storage_n2",
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
    "dataset distribution": (
        "train.case_linreg_adam_n2",
        "train.case_linreg_adam_n3",
        "train.case_linreg_sgd_m_n2",
        "train.case_linreg_sgd_m_n3",
        "train.case_linreg_sgd_n2",
        "train.case_linreg_sgd_n3",
        "train.case_linreg_sgd_one_device",
        "train.case_linreg_sgd_uneven_n2",
        "train.case_linreg_v1_adam_n2",
        "train.case_linreg_v1_adam_n3",
        "train.case_linreg_v1_momentum_n2",
        "train.case_linreg_v1_momentum_n3",
        "train.case_linreg_v1_sgd_n2",
        "train.case_linreg_v1_sgd_n3",
        "train.case_linreg_vs_single_n2",
    ),
}
