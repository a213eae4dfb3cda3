"""What simulated logs are fitted to: rates, shares and quantiles of a real log, KuaiRand-Pure.

Source: Gao et al., KuaiRand, CIKM 2022; CC BY-SA 4.0, see ``kuairand/README.md``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semantide.shared.simulator.chance import Floats

_FILE = Path(__file__).parent / "kuairand" / "marginals.json"


@dataclass(frozen=True)
class Marginals:
    """A real log in numbers.

    ``rates`` are shares of exposures with a signal; ``tabs`` the surfaces of the application.

    Shapes: ``hour_share`` [24]; ``tab_share``, ``tab_rate`` (of clicks) as ``tabs``.
    """

    rates: Mapping[str, float]
    tabs: tuple[str, ...]
    tab_share: Floats
    tab_rate: Floats
    hour_share: Floats
    watch_ratio: tuple[Floats, Floats]
    duration_ms: tuple[Floats, Floats]
    user_rate_sd: float
    item_rate_quantiles: Mapping[float, float]

    @classmethod
    def load(cls) -> Marginals:
        """Those of KuaiRand-Pure."""
        raw: dict[str, Any] = json.loads(_FILE.read_text())
        share = np.array(list(raw["tab_share"].values()))

        def quantiles(name: str) -> tuple[Floats, Floats]:
            return np.array([float(key) for key in raw[name]]), np.array(list(raw[name].values()))

        return cls(
            rates={name.removeprefix("is_"): rate for name, rate in raw["feedback_rate"].items()},
            tabs=tuple(raw["tab_share"]),
            tab_share=share / share.sum(),
            tab_rate=np.array([raw["click_rate_by_tab"][tab] for tab in raw["tab_share"]]),
            hour_share=np.array([raw["hour_share"][str(hour)] for hour in range(24)]),
            watch_ratio=quantiles("watch_ratio_q"),
            duration_ms=quantiles("duration_ms_q"),
            user_rate_sd=float(raw["user_ctr_sd_users_ge20"]),
            item_rate_quantiles={float(key): value for key, value in raw["item_ctr_q_items_ge50"].items()},
        )

    @property
    def long_given_click(self) -> float:
        """Share of clicks that became long views."""
        return self.rates["long_view"] / self.rates["click"]
