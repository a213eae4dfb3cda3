"""Where training begins: a logistic regression on all that is known of a pair without its ids, so that what is plain need not be learned in small steps.

Legend: X exposures, F known features, S signals.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from semantide.services.reward.examples import Batches
from semantide.shared.models.interest_search import IntArray
from semantide.shared.models.reward import RewardNetwork

MOST_EXPOSURES = 100_000
_SCORED = 8192
_STRENGTH = 0.1


def begin(network: RewardNetwork, batches: Batches, rows: IntArray, seed: int) -> None:
    """Set the straight part of the network, and the effects of place and tab, to what a logistic regression of each signal finds."""
    rows = np.sort(np.random.default_rng([seed, 5]).permutation(rows)[:MOST_EXPOSURES])
    config = network.config
    num_places, num_tabs = len(network.place_effects), len(network.tab_effects)
    columns = []
    for _, batch in batches.parts(rows, _SCORED):
        parts = [network.known(batch)]
        if batch.positions_X is not None and batch.tabs_X is not None:
            places, tabs = network.conditions(batch.positions_X, batch.tabs_X)
            parts += [torch.nn.functional.one_hot(places, num_places), torch.nn.functional.one_hot(tabs, num_tabs)]
        columns.append(torch.cat([part.float() for part in parts], 1).numpy())
    # As they are: all are of about the same size, but for content, whose many small numbers should not count for more.
    inputs = np.concatenate(columns).astype(np.float64)
    labels_XS, weights_X = batches.examples.labels_XS[rows], batches.examples.weights_X[rows]
    for column in range(len(config.signals)):
        if not 0 < labels_XS[:, column].mean() < 1:
            continue
        fitted = LogisticRegression(C=_STRENGTH, max_iter=300, tol=1e-5).fit(inputs, labels_XS[:, column], sample_weight=weights_X)
        slopes = fitted.coef_[0]
        with torch.no_grad():
            network.straight.weight[column] = torch.from_numpy(slopes[: config.known_features]).float()
            network.heads.bias[column] = float(fitted.intercept_[0])
            if len(slopes) > config.known_features:
                network.place_effects[:, column] = torch.from_numpy(slopes[config.known_features : config.known_features + num_places]).float()
                network.tab_effects[:, column] = torch.from_numpy(slopes[-num_tabs:]).float()
