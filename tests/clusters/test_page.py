"""docs/clusters.md says what the code does."""

from __future__ import annotations

import re

from rldsl import clusters
from rldsl.clusters.model import FIELDS
from tests.docs.pages import ROOT, table, words

PAGE = (ROOT / "docs/clusters.md").read_text()


def test_every_name_of_a_file_is_there() -> None:
    page = {words(row[0])[0]: row[1] for row in table(PAGE, "cluster file")}
    assert page.keys() == {"preset", *FIELDS, "measured"}
    assert all(page[name] == field.meaning for name, field in FIELDS.items())


def test_known_nodes_have_their_numbers() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.partition("## Built-in node types")[2].partition("\n## ")[0],
                           re.MULTILINE))
    assert tuple(sorted(rows)) == clusters.presets()
    for name, row in rows.items():
        known = clusters.preset(name)
        told = [float(re.sub(r"[^\d.]", "", cell)) for cell in row.split(" | ")[1:]]
        assert told == [known.memory_gb, known.bfloat16_tflops, known.float32_tflops, known.memory_gb_s,
                        known.link_gb_s,
                        known.network_gb_s, known.link_us], name
