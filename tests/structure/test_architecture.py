"""``docs/architecture.md`` is true to the code."""

from tests.structure.layers import PAGE, up_to_date


def test_the_page_has_the_tree_of_packages() -> None:
    page = PAGE.read_text()
    assert page == up_to_date(page), "run make docs"
