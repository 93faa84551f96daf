"""Train the vocabulary of the small world: 1,536 ids, byte-level BPE.

    python -m reference.toyworld.build_tokenizer [--out FOLDER]

writes tokenizer.json and tokenizer_config.json (default: checkpoint/ beside this file).

Method      A first tokenizer knows only bytes and the special tokens. Training episodes made with it, decoded, are the
            text from which the merges are learned; then every name, surname and noun is added often enough to become
            one token. Special tokens come first, ids 0 to 11, as in the small checkpoints of the tests; then 256
            bytes; then 1,268 merges. The same text gives the same file.
Mirrors     official: the splitting rules of the released tokenizer (digits in threes; a blank belongs to the word after
            it; punctuation with the newlines after it), its decoder and the spelling of the special tokens.
Leaves out  other special tokens of the release.
Test        tests/test_toyworld_corpus.py
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from inference.encoding import ASSISTANT, BOS, DSML, END_THINK, EOS, IMAGE, REMINDER, SYSTEM, THINK, USER
from inference.tokenizer import Tokenizer
from reference.toyworld import world
from reference.toyworld.corpus import CHECKPOINT, episode

VOCABULARY = 1536
PAD, NOISE = "<｜▁pad▁｜>", "<｜place▁holder▁no▁799｜>"  # official spellings; noise: of drafts
SPECIAL = tuple(map(str, (BOS, EOS, PAD, USER, ASSISTANT, IMAGE, NOISE, SYSTEM, THINK, END_THINK, DSML, REMINDER)))
EPISODES = (("text", 120, 8192), ("chat", 60, 8192), ("picture", 20, 4096))  # kind, how many, bytes each
REPEATS = 60  # of every word that must be one token

# official: the three splitting patterns of the released tokenizer.json.
_PATTERNS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)


def _untrained() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: Iterator[str], vocabulary: int) -> str:
    """The tokenizer.json of a vocabulary of this size, learned from the texts."""
    tokenizer = _untrained()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


def training_text() -> Iterator[str]:
    """Episodes of the training split, cut at their special tokens, and lists of the words that must be one token."""
    of_bytes = Tokenizer(train(iter(()), len(SPECIAL) + 256), "bytes")
    markers = re.compile("|".join(map(re.escape, SPECIAL)))
    for kind, episodes, tokens in EPISODES:
        for seed in range(episodes):
            text = of_bytes.decode(episode(seed, tokens, "train", of_bytes, kind=kind).ids)
            yield from filter(None, markers.split(text))
    spaced = (world.NAMES, world.SURNAMES, world.ADJECTIVES, world.NOUNS, world.PLACES, world.FOODS, world.DAYS,
              world.COUNTS, world.PARTS, world.PAINTS, world.SHAPES)
    for _ in range(REPEATS):
        yield "".join(f" {word}" for words in spaced for word in words)
        yield "\n".join(world.CAST)  # at the start of a line, without a blank
        yield " ".join(map(str, range(2 * world.LARGEST_OPERAND + 1)))


def build(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ValueError if the text gives fewer merges than wanted."""
    text = train(training_text(), VOCABULARY)
    found = Tokenizer(text, "training").vocab_size
    if found != VOCABULARY:
        raise ValueError(f"Building the tokenizer: wanted {VOCABULARY} ids, the text gave {found}. Use more episodes.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": str(BOS), "eos_token": str(EOS),
                "pad_token": PAD, "add_bos_token": False, "add_eos_token": False, "clean_up_tokenization_spaces": False}
    written = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(written, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m reference.toyworld.build_tokenizer",
                                     description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    options = parser.parse_args(arguments)
    build(options.out)
    print(f"{options.out}: {VOCABULARY} ids")


if __name__ == "__main__":
    main()
