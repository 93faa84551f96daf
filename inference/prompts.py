"""Input files: prompts and conversations, ready to run.

    .txt            prompts separated by blank lines; each is a user message in chat mode, or raw text
    .json           one conversation, or a list of conversations
    .jsonl          one conversation per line
A conversation is a list of messages (encoding.py), or an object with `messages` and optionally `tools`, `mode` ("chat" or
"thinking"), `effort` and `drop_thinking`. Image blocks name a file relative to the input file, or hold a data URL.

Mirrors: nothing published; the format inside is that of encoding.py. Tests: tests/test_prompts.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference.config import Config, unique_pairs
from inference.encoding import IMAGE, encode_chat
from inference.image_processor import ImageInput, expand_placeholders, process_image
from inference.tokenizer import Tokenizer

EXAMPLES = Path(__file__).parent / "examples"
LONGEST_NAME = 1024  # ours: characters; a longer text is image data, not a path
CONVERSATION_KEYS = {"messages", "tools", "mode", "effort", "drop_thinking"}


@dataclass(frozen=True)
class Source:
    """One prompt as it was given: plain text, or a conversation."""

    text: str | None = None
    messages: Sequence[dict] = ()
    tools: Sequence[dict] | None = None
    mode: str | None = None  # None: the caller's default
    effort: int | str | None = None
    drop_thinking: bool = True
    folder: Path = Path(".")  # image paths are relative to it


@dataclass(frozen=True)
class Prompt:
    """One prompt as the model takes it."""

    ids: list[int]
    token_types: list[int] | None  # None without images
    images: list[ImageInput] = field(default_factory=list)
    mode: str | None = None  # "chat" or "thinking"; None for raw text


def find_input(name: str | Path) -> Path:
    """The file as given, or under inference/examples/. Raises ValueError when it is in neither place."""
    for path in (Path(name), EXAMPLES / name) if len(str(name)) <= LONGEST_NAME else ():
        if path.is_file():
            return path
    examples = ", ".join(sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".txt", ".json", ".jsonl")))
    raise ValueError(f"Reading the prompts: there is no file {name}, neither as given nor under {EXAMPLES}. "
                     f"Examples there: {examples}.")


def read_prompts(path: Path) -> list[Source]:
    """All prompts of a file. Raises ValueError for an empty, unreadable or malformed one."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"Reading the prompts: {path} is not UTF-8 (byte {error.start}). Convert it first.") from None
    except OSError as error:
        raise ValueError(f"Reading the prompts: {path} cannot be read ({error.strerror}).") from None
    if not text.strip():
        raise ValueError(f"Reading the prompts: {path} is empty. Write at least one prompt.")
    kind = path.suffix.lower()
    if kind not in (".txt", ".json", ".jsonl", ""):
        raise ValueError(f"Reading the prompts: {path} ends in {path.suffix!r}; known are .txt, .json and .jsonl.")
    if kind == ".jsonl":
        # Not splitlines: JSON strings may hold other line separators of Unicode.
        lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        return [_conversation(_parse(line, where), where, path.parent) for where, line in lines]
    if kind == ".json":
        value = _parse(text, str(path))
        if isinstance(value, list) and value and all(isinstance(item, list) or isinstance(item, dict) and "messages" in item
                                           for item in value):
            return [_conversation(item, f"{path}, conversation {number}", path.parent)
                    for number, item in enumerate(value, 1)]
        return [_conversation(value, str(path), path.parent)]
    return [Source(text=part.strip("\n"), folder=path.parent) for part in re.split(r"\n[ \t\r]*\n", text.replace("\r\n", "\n"))
            if part.strip()]


def encode_prompt(source: Source, tokenizer: Tokenizer, config: Config, *, raw: bool = False, mode: str = "chat",
                  effort: int | str = "high") -> Prompt:
    """Token ids and images of one prompt. `mode` and `effort` hold where the source does not say.

    raw: a plain text is encoded as it stands after the begin marker, without the chat format. Raises ValueError for messages that
    the format cannot say, images that cannot be read, or a text without any token.
    """
    if source.text is not None and raw:
        ids = tokenizer.encode(source.text, allow_special=False)
        return Prompt([config.bos_token_id, *ids], None)
    messages = source.messages if source.text is None else [{"role": "user", "content": source.text}]
    mode = mode if source.mode is None else source.mode
    effort = effort if source.effort is None else source.effort
    encoded = encode_chat(tokenizer, messages, mode, effort, source.tools, source.drop_thinking)
    if not encoded.images:
        return Prompt(encoded.ids, None, mode=mode)
    if config.vision_config is None:
        raise ValueError("Encoding a prompt: it has images, but this checkpoint has no vision_config.")
    image_id = tokenizer.token_id(IMAGE)
    if image_id != config.image_token_id:
        raise ValueError(f"Encoding a prompt: the tokenizer gives {str(IMAGE)!r} the id {image_id}, config.json says "
                         f"image_token_id {config.image_token_id}. Use the tokenizer of this checkpoint.")
    images = [process_image(_located(image, source.folder), config.vision_config) for image in encoded.images]
    ids, types = expand_placeholders(encoded.ids, images, image_id)
    return Prompt(ids, types, images, mode)


def _located(image: Any, folder: Path) -> Any:
    """A relative path is meant from the folder of the input file; everything else passes."""
    if isinstance(image, dict) and set(image) <= {"url", "detail"} and "url" in image:
        image = image["url"]
    if isinstance(image, str) and len(image) <= LONGEST_NAME and not re.match(r"^(data:|https?:|file:)", image):
        path = folder / image
        if path.is_file():
            return path
        if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"):
            raise ValueError(f"Reading an image: {path} is not a file. Paths are meant from the folder of the input file.")
    return image


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Reading the prompts: {where} is not valid JSON ({error}).") from None


def _conversation(value: Any, where: str, folder: Path) -> Source:
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list) or not value["messages"]:
        raise ValueError(f"Reading the prompts: {where} holds no conversation. Wanted a list of messages, or an object "
                         "with `messages`.")
    unknown = sorted(set(value) - CONVERSATION_KEYS)
    if unknown:
        raise ValueError(f"Reading the prompts: {where} has the unknown key {unknown[0]!r}; known are "
                         f"{', '.join(sorted(CONVERSATION_KEYS))}.")
    if value.get("mode") not in (None, "chat", "thinking"):
        raise ValueError(f"Reading the prompts: {where}: mode must be \"chat\" or \"thinking\", got {value['mode']!r}.")
    if not isinstance(value.get("tools"), list | None):
        raise ValueError(f"Reading the prompts: {where}: tools must be a list, got {value['tools']!r}.")
    if not isinstance(value.get("drop_thinking", True), bool):
        raise ValueError(f"Reading the prompts: {where}: drop_thinking must be true or false, got "
                         f"{value['drop_thinking']!r}.")
    return Source(messages=value["messages"], tools=value.get("tools"), mode=value.get("mode"),
                  effort=value.get("effort"), drop_thinking=value.get("drop_thinking", True), folder=folder)
