"""Ridge regression and truncated SVD: how one space of item vectors is predicted from another, and made small.

Legend: N rows, P input width, Q output width, D kept directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils.extmath import randomized_svd

FloatArray = npt.NDArray[np.float32]

_SMALL = 512  # below this many rows or columns an exact decomposition is cheap
_TINY = 1e-12


def unit_rows(rows: npt.NDArray[Any]) -> FloatArray:
    """Rows scaled to length one; a zero row stays zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > _TINY, lengths, 1.0), dtype=np.float32)


def truncated_svd(matrix: Any, dim: int, seed: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The largest ``dim`` singular triplets of a sparse or dense matrix, signs fixed; fewer where the rank is lower.

    Shapes: ``matrix`` [N, P]; returns left [N, D], values [D], right [D, P].
    """
    rows, columns = matrix.shape
    dim = min(dim, rows, columns)
    if dim < 1:
        return np.zeros((rows, 0), np.float32), np.zeros(0, np.float32), np.zeros((0, columns), np.float32)
    if min(rows, columns) <= _SMALL:
        dense = np.asarray(matrix.todense() if hasattr(matrix, "todense") else matrix, dtype=np.float64)
        left, values, right = _exact(dense, dim)
    else:
        left, values, right = randomized_svd(matrix, n_components=dim, n_oversamples=32, n_iter=5, power_iteration_normalizer="LU", random_state=seed)
    keep = values > 1e-6 * max(float(values[0]), _TINY)
    return left[:, keep].astype(np.float32), values[keep].astype(np.float32), right[keep].astype(np.float32)


def _exact(dense: npt.NDArray[np.float64], dim: int) -> tuple[Any, Any, Any]:
    # Through the smaller Gram matrix: the longer side may have hundreds of thousands of rows.
    tall = dense.shape[0] >= dense.shape[1]
    gram = dense.T @ dense if tall else dense @ dense.T
    eigenvalues, vectors = np.linalg.eigh(gram)
    order = np.argsort(-eigenvalues, kind="stable")[:dim]
    values = np.sqrt(np.maximum(eigenvalues[order], 0.0))
    vectors = vectors[:, order]
    pivot = vectors[np.argmax(np.abs(vectors), axis=0), np.arange(len(order))]
    vectors = vectors * np.where(pivot < 0, -1.0, 1.0)
    other = (dense @ vectors if tall else dense.T @ vectors) / np.where(values > _TINY, values, 1.0)
    return (other, values, vectors.T) if tall else (vectors, values, other.T)


@dataclass(frozen=True)
class LinearMap:
    """An affine map fitted by ridge regression.

    Shapes: ``weight`` [P, Q], ``bias`` [Q].
    """

    weight: FloatArray
    bias: FloatArray

    @classmethod
    def fit(cls, inputs: npt.NDArray[Any], outputs: npt.NDArray[Any], ridge: float) -> LinearMap:
        """Least squares with a penalty of ``ridge`` times the inputs' mean squared singular value.

        Shapes: ``inputs`` [N, P], ``outputs`` [N, Q].
        """
        if len(inputs) != len(outputs) or not len(inputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs: give the same number, at least one")
        x_mean, y_mean = inputs.mean(axis=0, dtype=np.float64), outputs.mean(axis=0, dtype=np.float64)
        x, y = inputs - x_mean, outputs - y_mean
        gram = x.T @ x
        penalty = ridge * max(float(np.trace(gram)) / max(len(gram), 1), _TINY)
        weight = np.linalg.solve(gram + penalty * np.eye(len(gram)), x.T @ y) if len(gram) else np.zeros((0, y.shape[1]))
        return cls(weight.astype(np.float32), (y_mean - x_mean @ weight).astype(np.float32))

    def __call__(self, inputs: npt.NDArray[Any]) -> FloatArray:
        """The predicted rows [N, Q]."""
        return np.asarray(inputs @ self.weight + self.bias, dtype=np.float32)
