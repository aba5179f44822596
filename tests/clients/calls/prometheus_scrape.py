"""Prometheus' own reader of what it scrapes, after the scrape configuration of `corral env --for prometheus`."""

from __future__ import annotations

import os
import urllib.request
from collections import Counter
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families


def call_scrape() -> None:
    (job,) = yaml.safe_load(os.environ["SCRAPED"])["scrape_configs"]
    key = Path(job["authorization"]["credentials_file"]).read_text().strip()
    ((target,),) = [one["targets"] for one in job["static_configs"]]
    asked = urllib.request.Request(f"http://{target}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    twice = [name for name, count in Counter(family.name for family in families).items() if count > 1]
    assert len(families) > 10
    assert not twice, twice
    assert sum(len(family.samples) for family in families) > 20
