"""Engram: hashed n-grams of folded token ids read rows of a table, which are gated into the streams.

    fold:   token ids whose normalized text is equal share one class
    hash:   acc_s = XOR over look-backs 0..s of class(p - look-back) * multiplier[look-back];  s >= 1
            column (n-gram order s + 1, head): acc_s mod prime + offset of the column's sub-table
    read:   rows of all columns, concatenated;  [key_0 .. key_{C-1} | value] = rows W
    gate:   dot_c = sum(X_c q_weight_c k_weight_c key_c) / (rms(X_c) rms(key_c) sqrt(D))
            gate_c = sigmoid(sign(dot_c) sqrt(max(|dot_c|, 1e-6)));   X_c += gate_c * value

A look-back ends at the start of the sequence and at image positions: from there on every slot reads the folded pad id.
Image positions themselves get gate 0. Mirrors: Engram of the official inference code. Leaves out: the history across
calls. Test: tests/oracles/test_oracle_engram.py (golden hash ids of the released layout).
"""

import math
import re
import unicodedata

import numpy as np

from reference.oracles.basics import linear, sigmoid

SEED_FACTOR = 10007  # official: the multipliers of layer l come from a generator seeded with 10007 * l
DOT_FLOOR = 1e-6  # official: lower bound of |dot| under the square root
DEAD = None  # class of an image position
# Unicode White_Space; str.strip() without it would also strip the separators U+001C to U+001F
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


def byte_of_character() -> dict:
    """Byte-level alphabet of BPE tokenizers: printable bytes stand for themselves, the others for U+0100 upward."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    mapping = {chr(byte): byte for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in printable):
        mapping[chr(0x100 + offset)] = byte
    return mapping


def normalize(text: str) -> str:
    """The official chain of normalizers, spelled out. Single spaces survive; other text is stripped."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # "Strip accents" drops every mark, spacing ones (Mc) too; dropping Mn alone gives 99,510 classes, not 99,092
    text = "".join(character for character in text if not unicodedata.category(character).startswith("M"))
    text = "".join(character.lower() for character in text)  # one by one: no context rule for a final sigma
    text = re.sub("[ \t\r\n]+", " ", text)
    if text == " ":
        return " "
    return text.strip(WHITE_SPACE)


def fold_vocabulary(tokenizer: dict, vocab_size: int) -> list[int]:
    """Parsed tokenizer.json (byte-level BPE) -> class of every token id, numbered in order of first appearance."""
    tokens = {token_id: token for token, token_id in tokenizer["model"]["vocab"].items()}
    tokens.update({added["id"]: added["content"] for added in tokenizer["added_tokens"]})
    alphabet = byte_of_character()
    classes, result = {}, []
    for token_id in range(vocab_size):
        if token_id not in tokens:
            raise ValueError(f"folding the vocabulary: wanted {vocab_size} tokens, tokenizer.json lacks id {token_id}")
        token = tokens[token_id]
        spelled_in_bytes = all(character in alphabet for character in token)
        raw = bytes(alphabet[character] for character in token) if spelled_in_bytes else token.encode("utf-8")
        text = raw.decode("utf-8", errors="replace")
        key = token if "\ufffd" in text else (normalize(text) or text)
        result.append(classes.setdefault(key, len(classes)))
    return result


def multipliers(layer: int, class_count: int, max_ngram: int) -> list[int]:
    """One odd multiplier per look-back; the bound keeps class * multiplier inside a signed 64-bit integer."""
    bound = (2**63 - 1) // class_count // 2
    drawn = np.random.default_rng(SEED_FACTOR * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return [2 * int(value) + 1 for value in drawn]


def is_prime(number: int) -> bool:
    """By trial division."""
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def column_primes(layer_count: int, max_ngram: int, heads: int, start: int) -> list[list[int]]:
    """Per Engram layer the primes of its columns (order 2 heads, order 3 heads, ...); none is used twice."""
    number, result = start, []
    for _ in range(layer_count):
        primes = []
        while len(primes) < (max_ngram - 1) * heads:
            if is_prime(number):
                primes.append(number)
            number += 1
        result.append(primes)
    return result


def hash_ids(classes: list, pad_class: int, factors: list[int], primes: list[int], heads: int) -> np.ndarray:
    """classes of one sequence [S] (DEAD inside images) -> table rows int64 [S, columns]."""
    offsets = [sum(primes[:column]) for column in range(len(primes))]
    result = np.empty((len(classes), len(primes)), np.int64)
    for p in range(len(classes)):
        slots, alive = [], True
        for look_back in range(len(factors)):
            alive = alive and p - look_back >= 0 and classes[p - look_back] is not DEAD
            slots.append(classes[p - look_back] if alive else pad_class)
        accumulated = slots[0] * factors[0]
        for s in range(1, len(factors)):
            accumulated ^= slots[s] * factors[s]
            for head in range(heads):
                column = (s - 1) * heads + head
                result[p, column] = accumulated % primes[column] + offsets[column]
    return result


def all_hash_ids(classes: list, text_config: dict, token_classes: list) -> dict[int, np.ndarray]:
    """classes of one sequence -> per Engram layer id its table rows [S, columns]."""
    layers, heads = text_config["engram_layer_ids"], text_config["engram_n_heads"]
    max_ngram = text_config["engram_max_ngram_size"]
    primes = column_primes(len(layers), max_ngram, heads, text_config["engram_vocab_size"])
    pad_class = token_classes[text_config["engram_pad_token_id"]]
    result = {}
    for slot, layer in enumerate(layers):
        wanted = text_config["engram_num_embeddings"][slot]
        if sum(primes[slot]) != wanted:
            raise ValueError(
                f"hashing for Engram layer {layer}: config.json wants {wanted} table rows, the primes sum to "
                f"{sum(primes[slot])}; check engram_vocab_size and engram_n_heads"
            )
        factors = multipliers(layer, text_config["engram_compressed_vocab_size"], max_ngram)
        result[layer] = hash_ids(classes, pad_class, factors, primes[slot], heads)
    return result


def engram(
    streams: np.ndarray, row_ids: np.ndarray, image_mask: np.ndarray, weights: dict, prefix: str, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """streams [S, C, D], row_ids [S, columns] -> gate [S, C], updated streams [S, C, D]."""
    copies, width = streams.shape[1:]
    gate, result = np.zeros(streams.shape[:2]), np.array(streams)
    for p in range(len(streams)):
        if image_mask[p]:
            continue
        rows = weights[prefix + "embed.weight"][row_ids[p]].reshape(-1)
        parts = linear(rows, weights[prefix + "wkv.weight"]).reshape(copies + 1, width)
        for c in range(copies):
            x, key, value = streams[p, c], parts[c], parts[copies]
            product = x * weights[prefix + "q_weight"][c] * weights[prefix + "k_weight"][c] * key
            rms_x, rms_key = (math.sqrt((v * v).mean() + eps) for v in (x, key))
            dot = product.sum() / (rms_x * rms_key * math.sqrt(width))
            gate[p, c] = sigmoid(math.copysign(math.sqrt(max(abs(dot), DOT_FLOOR)), dot))
            result[p, c] = x + gate[p, c] * value
    return gate, result
