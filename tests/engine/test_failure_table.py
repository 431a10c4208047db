"""The table of failures in the documentation is that of the tests."""

from tests.engine.failure_table import DOCUMENT, missing_tests, with_table


def test_every_failure_has_its_test() -> None:
    assert missing_tests() == []


def test_the_document_shows_the_table_of_now() -> None:
    document = DOCUMENT.read_text()
    assert with_table(document) == document, "run: python -m tests.engine.failure_table"
