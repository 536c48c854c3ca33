"""Dashboard and alerts: every metric that they name is one of the daemon's, and the docs have each.

Whether their queries find data, and the alerts fire, is tests/e2e/test_dashboard.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from proxy.bottleneck import CODES
from proxy.metrics import Metrics

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "rollmux.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
ENDINGS = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}


def series() -> dict[str, set[str]]:
    """Names that Prometheus would store, with their labels."""
    found = {}
    for collector in Metrics("1").registry._collector_to_names:
        labels = set(collector._labelnames)
        for family in collector.collect():
            for ending in ENDINGS[family.type]:
                found[family.name + ending] = labels | ({"le"} if ending == "_bucket" else set())
    return found


def queries() -> list[str]:
    """Of all panels, and of the dashboard's variables."""
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    panels = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    variables = [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]
    return panels + variables


def expressions() -> list[str]:
    """Of all alerts, each on one line."""
    text = ALERTS.read_text("utf-8")
    found = re.findall(r"expr: (?:>-\n)?(.*?)\n        (?:for|labels):", text, re.DOTALL)
    assert len(found) == text.count("- alert:")
    return [" ".join(expression.split()) for expression in found]


@pytest.mark.parametrize("query", queries() + expressions())
def test_metrics_and_labels_of_a_query_are_the_daemons(query):
    known = series()
    names = set(re.findall(r"\b(rollmux_\w+|up)\b(?!\")", query)) - {"up"}
    assert names <= known.keys(), names - known.keys()
    labels = {label for name in names for label in known[name]} | {"job", "instance"}
    matched = re.findall(r"[{,]\s*(\w+)\s*[=!]~?\"", query)
    grouped = re.findall(r"(?:by|on) \(([^)]*)\)", query)
    used = {*matched, *(word.strip() for group in grouped for word in group.split(","))}
    assert used <= labels, used - labels


def test_names_of_the_metrics_are_really_looked_for():
    assert "rollmux_requests_total" in series()
    assert "rollmux_upstream_seconds_bucket" in series()
    assert len(queries()) > 25
    assert len(expressions()) > 10


def test_panels_have_a_title_an_id_of_their_own_and_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        assert panel["title"]
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_every_alert_and_every_cause_is_explained():
    page = (ROOT / "docs" / "seeing.md").read_text("utf-8")
    alerts = re.findall(r"- alert: (\w+)", ALERTS.read_text("utf-8"))
    headings = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert headings == alerts
    assert [f"`{code}`" for code in CODES if f"| `{code}` |" not in page] == []
