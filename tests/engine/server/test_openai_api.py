import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.tokenizer import Tokenizer
from tests.engine.test_grammar import TOO_LARGE

QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Shift 1, job 2?"}]
SCHEMA = {
    "type": "object",
    "properties": {"action": {"enum": ["next", "stop"]}, "job": {"type": "integer", "maximum": 99}},
    "required": ["action", "job"],
    "additionalProperties": False,
}


def chat(api: openai.OpenAI, **fields: Any) -> Any:
    return api.chat.completions.create(model="tiny", messages=QUESTION, **fields)  # type: ignore[call-overload]


def complete(api: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return api.completions.create(model="tiny", prompt=prompt, **fields)  # type: ignore[call-overload]


def test_the_model_is_listed(api: openai.OpenAI):
    assert [model.id for model in api.models.list().data] == ["tiny"]
    assert api.models.retrieve("tiny").id == "tiny"


def test_another_model_is_not_found(api: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="'tiny' is"):
        api.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "hi"}])


def test_usage_counts_prompt_and_reply_and_carries_the_ledger(api: openai.OpenAI, tiny_model_dir):
    reply = chat(api, max_tokens=7, temperature=0, extra_body={"ignore_eos": True})
    prompt = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nShift 1, job 2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    num_prompt_tokens = len(Tokenizer(tiny_model_dir).encode(prompt))
    assert reply.usage.prompt_tokens == num_prompt_tokens
    assert reply.usage.completion_tokens == 7
    ledger = reply.usage.model_extra["dayshift"]
    assert ledger["generated"] == 7
    assert ledger["computed"] + ledger["reused"] + ledger["recomputed"] == num_prompt_tokens


sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.7, 1.5]),
        "seed": st.integers(-5, 2**40),
        "max_tokens": st.integers(1, 24),
        "n": st.integers(1, 3),
        "top_p": st.sampled_from([0.5, 1.0]),
        "stop": st.sampled_from([None, "a", ["to", "e"], [" again"]]),
        "logprobs": st.booleans(),
    }
)


@given(sampling)
@settings(max_examples=25, deadline=None)
def test_a_streamed_chat_is_the_whole_chat(api: openai.OpenAI, fields: dict):
    whole = chat(api, **fields)
    texts, reasons, logprobs = {}, {}, {}
    usage: Any = None
    for chunk in chat(api, stream=True, stream_options={"include_usage": True}, **fields):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing follows the finish chunk of a choice"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.logprobs:
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.content)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
        if fields["logprobs"]:
            whole_tokens = [token.token for token in choice.logprobs.content]
            assert [token.token for token in logprobs[choice.index]] == whole_tokens
    assert len(whole.choices) == len(reasons) == fields["n"]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_usage_so_far_in_every_chunk(api: openai.OpenAI):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = list(
        complete(
            api,
            [5, 6, 7],
            max_tokens=9,
            stream=True,
            stream_options=options,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    )
    num_tokens = 0
    for event in events[:-1]:
        num_tokens += len(event.choices[0].model_extra["token_ids"])
        assert event.usage.completion_tokens >= num_tokens
        assert event.usage.total_tokens == 3 + event.usage.completion_tokens
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == events[-2].usage.completion_tokens == 9


def test_a_seed_repeats_itself_and_each_choice_is_another(api: openai.OpenAI):
    first, second = (chat(api, seed=5, n=3, max_tokens=12) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3
    assert texts[0] != chat(api, seed=6, max_tokens=12).choices[0].message.content


def test_a_stop_string_ends_the_reply_and_is_left_out(api: openai.OpenAI):
    free = chat(api, temperature=0, max_tokens=40, extra_body={"ignore_eos": True})
    text = free.choices[0].message.content
    assert free.choices[0].finish_reason == "length"
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = chat(api, temperature=0, max_tokens=40, stop=[middle]).choices[0]
    assert stopped.message.content == text[: text.index(middle)]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_obeyed(api: openai.OpenAI, stream: bool):
    response_format = {"type": "json_schema", "json_schema": {"name": "command", "schema": SCHEMA}}
    for seed in range(4):
        reply = chat(api, seed=seed, max_tokens=64, response_format=response_format, stream=stream)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
        else:
            text = reply.choices[0].message.content
            assert reply.choices[0].finish_reason == "stop"
        body = json.loads(text)
        assert body["action"] in ("next", "stop")
        assert body["job"] <= 99


def test_json_object_gives_an_object(api: openai.OpenAI):
    reply = chat(api, seed=1, max_tokens=200, temperature=2, response_format={"type": "json_object"})
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content), dict)
    assert reply.choices[0].message.content.startswith("{")


def test_a_bad_schema_is_refused_in_one_line(api: openai.OpenAI):
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "banana"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(api, response_format=response_format)
    message = str(caught.value.body["message"])  # type: ignore[index]
    assert message.startswith("response_format: Invalid type: banana")
    assert caught.value.param == "response_format"
    assert "\n" not in message


@pytest.mark.parametrize("schema", [TOO_LARGE, {"$ref": "#"}])
def test_a_schema_that_fails_on_the_way_is_the_requests_fault(api: openai.OpenAI, schema: dict[str, object]):
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(api, seed=1, temperature=2, max_tokens=200, response_format=response_format)
    assert caught.value.param == "response_format"
    with pytest.raises(openai.APIError) as caught_in_stream:
        for _ in chat(api, stream=True, seed=1, temperature=2, response_format=response_format):
            pass
    assert caught_in_stream.value.param == "response_format"
    assert chat(api, max_tokens=3).choices[0].message.content is not None  # the engine goes on


def test_top_logprobs_begin_with_the_greedy_choice(api: openai.OpenAI):
    reply = chat(api, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3)
    tokens = reply.choices[0].logprobs.content
    assert len(tokens) == reply.usage.completion_tokens
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.token == token.top_logprobs[0].token
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)


def test_text_and_token_id_prompts_agree_and_keep_their_order(api: openai.OpenAI, tiny_model_dir):
    tokenizer = Tokenizer(tiny_model_dir)
    texts = ["put the bowl", "Result: done.", "Review of shift"]
    ids = [tokenizer.encode(text) for text in texts]
    fields = {"temperature": 0, "max_tokens": 6}
    singles = [complete(api, text, **fields).choices[0].text for text in texts]
    assert [choice.text for choice in complete(api, texts, **fields).choices] == singles
    assert [choice.text for choice in complete(api, ids, **fields).choices] == singles
    assert complete(api, ids[1], **fields).choices[0].text == singles[1]


def test_ignore_eos_generates_exactly_max_tokens(api: openai.OpenAI):
    extra = {"ignore_eos": True, "return_token_ids": True}
    reply = complete(api, "a b c", max_tokens=50, seed=0, extra_body=extra)
    assert reply.usage.completion_tokens == 50
    assert len(reply.choices[0].model_extra["token_ids"]) == 50
    assert reply.choices[0].finish_reason == "length"


def test_a_streamed_completion_is_the_whole_completion(api: openai.OpenAI):
    fields = {"max_tokens": 30, "seed": 3, "logprobs": 2, "n": 2}
    whole = complete(api, ["one", "two"], **fields)
    texts, reasons, offsets = {}, [], {}
    for chunk in complete(api, ["one", "two"], stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs:
                offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
            if choice.finish_reason:
                reasons.append(choice.index)
    assert sorted(reasons) == [0, 1, 2, 3]
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert offsets[choice.index] == choice.logprobs.text_offset
        lengths = [len(token) for token in choice.logprobs.tokens]
        assert choice.logprobs.text_offset == [sum(lengths[:i]) for i in range(len(lengths))]


def test_content_parts_and_the_developer_role_are_plain_messages(http: httpx.Client):
    def text(messages: list) -> str:
        body = {"messages": messages, "temperature": 0, "max_tokens": 8}
        return http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]

    parts = [{"type": "text", "text": "Shift 1, "}, {"type": "text", "text": "job 2?"}]
    developer = {"role": "developer", "content": "be brief"}
    assert text([developer, {"role": "user", "content": parts}]) == text(QUESTION)
