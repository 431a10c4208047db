"""The quickstart's three kinds of memory, side by side: what recall is for. A long suite of its own."""

from __future__ import annotations

import json

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_recall_reviews_are_worse_and_with_the_full_history_calls_cost_more(dayshift):
    ended = dayshift("run", "quickstart_memory", "--json")
    assert ended.returncode == 0, ended.stderr
    recall, window, full = json.loads(ended.stdout)["runs"]
    assert [run["label"] for run in (recall, window, full)] == [
        "memory=recall_kv",
        "memory=window",
        "memory=full",
    ]
    for run in (recall, window, full):
        assert (run["reviews"], run["false_redo"], run["is_finished"]) == (3, 0, True)
        assert run["given_up"] >= 2
    assert recall["review_answers_correct"] == full["review_answers_correct"] == 3
    assert recall["redone"] > window["redone"]
    assert recall["review_answers_correct"] > window["review_answers_correct"]
    assert recall["recalled_tokens"] > 0 == window["recalled_tokens"]
    assert recall["prompt_tokens_computed_per_call"] <= 120
    assert full["prompt_tokens_computed_per_call"] > 3 * recall["prompt_tokens_computed_per_call"]
