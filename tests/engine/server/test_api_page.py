from tests.engine.server.api_table import PAGE, page_with_tables, tables


def test_the_tables_of_the_page_are_those_of_the_code():
    """`python -m tests.engine.server.api_table` writes them."""
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(page) == page


def test_the_tables_tell_accepted_neutral_and_refused_fields_apart():
    chat = tables().split("###")[1]
    for row in (
        "| `logit_bias` | yes |",
        "| `audio` | refused |",
        "| `store` | neutral |",
        "| `reasoning_budget` | own |",
    ):
        assert row in chat
