"""Make the tokenizer of the built-in model `tiny`: run it by hand, commit what it writes. The output depends on nothing but this file.

    python tools/make_tiny_tokenizer.py [FOLDER]      # default: src/rolemesh/models/tiny

A byte-level BPE of 512 tokens: all 256 bytes, so that any text survives encoding and decoding, `<pad>`, `<bos>`, `<eos>`, and merges
learnt from questions of simple reasoning-gym tasks. Digits stay single tokens, which is what lets a model of a million parameters
learn to calculate. Merges may cross spaces, so that the fixed words of a question ("State the final answer to ...") become one or
two tokens and a step spends its time on the numbers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import reasoning_gym

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 512
SPECIAL = ("<pad>", "<bos>", "<eos>")
TASKS = ("chain_sum", "products", "gcd", "lcm", "simple_equations", "basic_arithmetic", "count_bits")
QUESTIONS = 200
FOLDER = Path(__file__).resolve().parents[1] / "src" / "rolemesh" / "models" / "tiny"


def texts() -> Iterator[str]:
    """Questions and answers of every task, the same ones every time."""
    for task in TASKS:
        dataset = reasoning_gym.create_dataset(task, seed=0, size=QUESTIONS)
        for index in range(QUESTIONS):
            yield dataset[index]["question"]
            yield str(dataset[index]["answer"])


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Cut around every digit and at line ends, nowhere else.
    cut = pre_tokenizers.Split(Regex(r"[0-9]|\n+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    bos = SPECIAL.index("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)])
    return tokenizer


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    train().save(str(folder / "tokenizer.json"), pretty=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
