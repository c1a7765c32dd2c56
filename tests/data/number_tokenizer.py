"""A tokenizer for tests whose ids can be read off the text."""

from __future__ import annotations


class Numbers:
    """A tokenizer whose texts are numbers between spaces, each its own id; other words are 9. Id 1 begins, id 2 ends."""

    bos_token_id = 1
    eos_token_id = 2
    name_or_path = "numbers"
    chat_template = None
    added_tokens_decoder = {}

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [int(word) if word.isdecimal() else 9 for word in text.split()]}

    def apply_chat_template(self, messages, *, tools=None, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        return " ".join(message["content"] for message in messages) + " 7"
