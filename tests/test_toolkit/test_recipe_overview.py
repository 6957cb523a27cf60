"""The README's table of recipes is the one the recipes make."""

from __future__ import annotations

import re
from pathlib import Path

from toolkit.recipes import RECIPES
from toolkit.recipes._overview import overview

README = Path(__file__).resolve().parents[2] / "README.md"


def test_table_in_readme() -> None:
    found = re.search(r"<!-- recipes -->\n(.*?)\n<!-- /recipes -->", README.read_text(), re.DOTALL)
    assert found, "README.md holds no <!-- recipes --> .. <!-- /recipes -->"
    # To renew it: python -c "from toolkit.recipes._overview import overview; print(overview())"
    assert found.group(1).strip() == overview()


def test_a_row_says_where_momentum_hides() -> None:
    rows = {line.split("`")[1]: line for line in overview().splitlines()[2:]}
    assert set(rows) == set(RECIPES.names())
    assert "| buffer (in `.grad`) | none | momentum, column magnitude | none | none |" in rows["mesh"]
    assert "arXiv 2607.19058 | row moment, column moment | row moment, column moment, momentum |" in rows["skewadam"]
