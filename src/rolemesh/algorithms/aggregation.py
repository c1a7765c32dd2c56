"""How the tokens of a mini-batch are weighed into one loss, decided over the whole mini-batch before anything is cut.

Each function works on the small columns of a whole step, on the controller. Because a row's weight already holds every normalizer, the
loss of a mini-batch is the plain sum of weight * token loss over any cut into micro-batches and any number of workers.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Mode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum"]


def assign_minibatches(draws: npt.NDArray[Any], n: int) -> npt.NDArray[np.int64]:
    """Mini-batch [N] of every row: whole prompts, in ascending order of `draws` [N], in `n` shares that differ by one prompt at most.

    The earlier shares are the larger ones. With fewer prompts than `n` only the first mini-batches exist.
    """
    if n < 1:
        raise ValueError(f"a step has at least 1 mini-batch, found {n}")
    prompts, prompt_of_row = np.unique(draws, return_inverse=True)
    size, larger = divmod(len(prompts), n)
    shares = np.repeat(np.arange(n), size + (np.arange(n) < larger))
    return shares[prompt_of_row].astype(np.int64)


def token_weights(
    lengths: npt.NDArray[Any], valid: npt.NDArray[np.bool_], minibatches: npt.NDArray[np.int64], mode: Mode
) -> npt.NDArray[np.float64]:
    """Weight [N] of every token of a row in the loss of its mini-batch; 0 for rows that are not valid or have no tokens.

    With L_i the response length of row i and V the valid rows with tokens of its mini-batch, the loss is

    - `token_mean`: mean over all tokens, weight 1 / sum_V L (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 12);
    - `seq_mean_token_mean`: mean over rows of each row's mean, weight 1 / (|V| L_i) (GRPO, Shao et al. 2024, arXiv:2402.03300);
    - `seq_mean_token_sum`: mean over rows of each row's sum, weight 1 / |V|;
    - `token_sum`: sum over all tokens, weight 1.
    """
    rows = valid & (lengths > 0)
    of = minibatches[rows]
    length = lengths[rows].astype(np.float64)
    row_count = np.bincount(of)[of]
    weights = np.zeros(len(lengths))
    match mode:
        case "token_mean":
            weights[rows] = 1.0 / np.bincount(of, length)[of]
        case "seq_mean_token_mean":
            weights[rows] = 1.0 / (row_count * length)
        case "seq_mean_token_sum":
            weights[rows] = 1.0 / row_count
        case "token_sum":
            weights[rows] = 1.0
        case _:
            raise ValueError(f"unknown aggregation {mode!r}")
    return weights
