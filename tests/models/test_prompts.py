"""Prompts: exactly one BOS whatever the path."""

import pytest

from rolemesh.config.schema import ModelConfig
from rolemesh.errors import ConfigError
from rolemesh.models import encode_prompt, load_tokenizer

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
BOS = 1


@pytest.fixture
def tokenizer():
    return load_tokenizer(ModelConfig())


def body(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_C19_raw_prompt_has_one_bos(tokenizer):
    assert encode_prompt(tokenizer, "4 - 1 =", chat=False) == [BOS, *body(tokenizer, "4 - 1 =")]


def test_C19_raw_prompt_that_writes_its_bos_has_one(tokenizer):
    assert encode_prompt(tokenizer, "<bos>4 - 1 =", chat=False) == [BOS, *body(tokenizer, "4 - 1 =")]


@pytest.mark.parametrize("template", [PLAIN, "{{ bos_token }}" + PLAIN, "{{ bos_token }}{{ bos_token }}" + PLAIN])
def test_C19_template_with_and_without_bos_has_one(tokenizer, template):
    tokenizer.chat_template = template
    expected = [BOS, *body(tokenizer, "[user]hi[assistant]")]
    assert encode_prompt(tokenizer, [{"role": "user", "content": "hi"}], chat=True) == expected
    assert encode_prompt(tokenizer, "hi", chat=True) == expected


def test_C19_marks_inside_the_conversation_stay(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}<bos>{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert encode_prompt(tokenizer, messages, chat=True) == [BOS, *body(tokenizer, "a"), BOS, *body(tokenizer, "b")]


def test_C19_tokenizer_without_bos_gets_none(tokenizer):
    tokenizer.bos_token = None
    assert encode_prompt(tokenizer, "4", chat=False) == body(tokenizer, "4")


def test_empty_prompt_is_the_bos_alone(tokenizer):
    assert encode_prompt(tokenizer, "", chat=False) == [BOS]


def test_messages_without_chat_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.chat: prompts must be text"):
        encode_prompt(tokenizer, [{"role": "user", "content": "hi"}], chat=False)


def test_chat_without_template_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"data.chat: the tokenizer must have a chat template; found none in .*tiny"):
        encode_prompt(tokenizer, "hi", chat=True)


def test_C19_system_message_of_the_template_itself_comes_once_and_after_one_bos(tokenizer):
    own = "{% if messages[0].role != 'system' %}<bos>[system]Be brief.{% endif %}"
    tokenizer.chat_template = own + PLAIN
    assert encode_prompt(tokenizer, "hi", chat=True) == [BOS, *body(tokenizer, "[system]Be brief.[user]hi[assistant]")]
    given = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    assert encode_prompt(tokenizer, given, chat=True) == [BOS, *body(tokenizer, "[system]Be kind.[user]hi[assistant]")]


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}", "System role not supported"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[", "unexpected"),
    ],
)
def test_messages_that_a_template_refuses_are_a_config_error_with_their_roles(tokenizer, template, found):
    tokenizer.chat_template = template
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    with pytest.raises(ConfigError, match=rf"data\.chat: the chat template of .*tiny must accept the prompts.*{found}.*system, user"):
        encode_prompt(tokenizer, messages, chat=True)
