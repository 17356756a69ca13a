"""`docs/families.md` is what the table of families makes of it."""

import importlib.util
from pathlib import Path

from ropewalk.model.families import FAMILIES, MISSING_MATHEMATICS

TOP = Path(__file__).parents[1]


def test_the_page_is_current_and_names_every_row():
    spec = importlib.util.spec_from_file_location("families_page", TOP / "tools" / "families_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (TOP / "docs" / "families.md").read_text(encoding="utf-8")
    assert text == module.page(), "run python tools/families_page.py"
    for name in (*FAMILIES, *MISSING_MATHEMATICS):
        assert f"`{name}`" in text
    assert not set(FAMILIES) & set(MISSING_MATHEMATICS)
