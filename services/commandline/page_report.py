"""``semantide pages``: what a data set's pages are like, and whether training by pages can pay on them."""

from __future__ import annotations

from typing import Annotated

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.jobs import AsJson
from semantide.shared.config import Settings


def pages(
    dataset: Annotated[str | None, typer.Argument(help="A data set (datasets/...); left out, the newest")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what the pages of a data set are like: how many have several positives, how often what is shown is answered, and how much the place on a page decides."""
    client = Client(Settings())
    ref = dataset or client.latest("dataset", "dataset")
    report = client.get(f"/v1/datasets/{ref}/pages")
    if as_json:
        display.as_json(report)
        return
    rates = report["label_rates"]
    rows = [
        ["pages", f"{report['pages']:,}"],
        ["items shown on them", f"{report['shown']:,} ({report['items_per_page']:.2f} a page)"],
        ["ordered, clicked, only shown, disliked", ", ".join(f"{rates[name]:.2%}" for name in ("ordered", "clicked", "exposed", "disliked"))],
        ["pages with a positive (ordered or clicked)", f"{report['pages_with_positive']:,} ({report['positives_per_page_with_positive']:.2f} positives each)"],
        ["pages with two positives or more", f"{report['pages_with_two']:,} ({report['share_of_pages_with_two']:.1%})"],
        ["positives on those", f"{report['positives_together']:,} ({report['share_of_positives_together']:.1%})"],
        ["pages with a positive and something only shown", f"{report['pages_with_exposed']:,}"],
    ]
    display.table(f"Pages of {ref[:26]}...", ["what", "figure"], rows)
    display.table("Pages by size", ["items", "pages"], [[size, f"{count:,}"] for size, count in report["pages_by_size"].items() if count])
    if report["positions"]:
        places = [[str(row["position"]), f"{row['shown']:,}", f"{row['rate']:.2%}", f"{row['lift']:.2f}"] for row in report["positions"]]
        display.table("Places on pages with positives and others", ["place", "shown", "positives", "against the page's average"], places)
    display.console.print(report["verdict"], highlight=False, markup=False)
