"""The chat format: messages to one prompt, and a completion back to a message.

    BOS [<｜System｜>effort line] { <｜System｜>text | <｜User｜>text | <｜Assistant｜>[<think>reasoning]</think>text EOS }
    <｜Assistant｜> + <think> (thinking mode) or </think> (chat mode)      <- the model continues here

In          messages in the OpenAI shape: dicts with `role` (system, user, assistant, tool, latest_reminder) and
            `content` (a string, or blocks of type text, image, image_url), optionally `tool_calls`, `tool_call_id`,
            `reasoning_content` (or `reasoning`), `tools` (on a system message) and `task`.
Out         `render`: the prompt as one string, for reading and for comparing byte by byte.
            `encode_chat`: the prompt as token ids, one placeholder id per image, and the images in order.
            `parse_completion`: reasoning, content and tool calls of what the model wrote.
Method      A prompt is a list of pieces. A `Marker` is written by this file and becomes exactly one special id; a plain
            string is somebody's text and is encoded without special tokens. Both string and ids come from that list,
            so a marker that a user types is text in the ids (ours; reportedly the hosted service too). `render`
            cannot show the difference: never tokenize its result, call `encode_chat`.
Mirrors     official: prompt encoder of the release (revision dba1be0a). V4.1 differs from V4 by `<｜System｜>`, the
            numeric effort line and the space after `｜DSML｜`.
Leaves out  expanding an image into its span (image_processor.py), sampling, turns to be continued by the model, and
            repair of malformed output: the parser reads what the format allows and says what is wrong otherwise.
Tests       tests/test_encoding.py; rendered prompts in reference/golden/chat_vectors.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference.tokenizer import Tokenizer


class Marker(str):
    """A special token that this file wrote. A plain str of the same spelling is ordinary text."""


BOS = Marker("<｜begin▁of▁sentence｜>")
EOS = Marker("<｜end▁of▁sentence｜>")
SYSTEM, USER, ASSISTANT = Marker("<｜System｜>"), Marker("<｜User｜>"), Marker("<｜Assistant｜>")
REMINDER = Marker("<｜latest_reminder｜>")
THINK, END_THINK = Marker("<think>"), Marker("</think>")
DSML = Marker("｜DSML｜")
IMAGE = Marker("<｜deepseek_image｜>")
TASKS = ("action", "query", "authority", "domain", "read_url", "title")  # official: quick tasks, marker <｜name｜>
MARKERS = (BOS, EOS, SYSTEM, USER, ASSISTANT, REMINDER, THINK, END_THINK, DSML, IMAGE) + tuple(
    Marker(f"<｜{task}｜>") for task in TASKS
)
_MARKER_PATTERN = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")

# official: refused in user text. The second is how DeepSeek's prompt library spells the placeholder.
_IMAGE_SPELLINGS = (str(IMAGE), "<｜image｜>")

EFFORTS = (("low", 50), ("high", 75), ("max", 100))  # official: named efforts; "high" is the default
_EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

# official: prompt data, byte for byte.
_TOOLS_BLOCK_HEAD = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜ calls>" block like the following:

<｜DSML｜ calls>
<｜DSML｜ invoke name="$TOOL_NAME">
<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜ parameter>
...
</｜DSML｜ invoke>
<｜DSML｜ invoke name="$TOOL_NAME2">
...
</｜DSML｜ invoke>
</｜DSML｜ calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_BLOCK_TAIL = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)

_ROLE_KEYS = {
    "system": {"tools"},
    "user": {"task"},
    "assistant": {"task", "tool_calls", "reasoning_content", "reasoning"},
    "tool": {"tool_call_id", "name"},  # the name is not written: the format links results to calls by order
    "latest_reminder": set(),
}


@dataclass(frozen=True)
class EncodedPrompt:
    """`ids`: the prompt, one image placeholder id per image; `images`: what the image blocks held, in that order."""

    ids: list[int]
    images: list[Any]


@dataclass(frozen=True)
class _Turn:
    """Neighboring user and tool messages are one turn; every other message is its own."""

    role: str  # system, user, assistant or latest_reminder
    body: list[str]  # pieces after the role marker; of an assistant turn: after its thinking
    reasoning: str = ""
    task: str | None = None
    images: list[Any] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------- messages to a prompt


def render(
    messages: Sequence[dict], mode: str = "thinking", effort: int | str = "high", tools: Sequence[dict] | None = None,
    drop_thinking: bool = True,
) -> str:
    """The prompt as one string.

    mode: "thinking" or "chat". effort: 1..100, "low", "high" or "max"; thinking mode only. tools: OpenAI tool
    declarations; they go to the first system message, or into one made for them. drop_thinking: remove the reasoning
    of earlier turns, which happens only while no tools are declared.

    Raises ValueError for anything the format cannot say, and for markers inside an assistant message: in a flat
    string they would be read back as structure (ours: `encode_chat` keeps them as text).
    """
    turns, keep_reasoning = _read_messages(messages, tools, drop_thinking)
    for turn in turns:
        for piece in turn.body + [turn.reasoning] if turn.role == "assistant" else []:
            found = None if isinstance(piece, Marker) else _MARKER_PATTERN.search(piece)
            if found:
                raise ValueError(
                    f"Rendering an assistant message as a string: its text contains {found[0]!r}, which would read as "
                    "a special token. Use encode_chat, which encodes it as ordinary text, or remove it."
                )
    return "".join(_prompt_pieces(turns, mode, effort, keep_reasoning))


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[dict], mode: str = "thinking", effort: int | str = "high",
    tools: Sequence[dict] | None = None, drop_thinking: bool = True,
) -> EncodedPrompt:
    """The prompt as token ids; arguments as for `render`.

    Only markers of the format become special ids. Raises ValueError like `render`, and when the tokenizer lacks a
    marker that this prompt needs.
    """
    turns, keep_reasoning = _read_messages(messages, tools, drop_thinking)
    ids: list[int] = []
    for piece in _merge_text(_prompt_pieces(turns, mode, effort, keep_reasoning)):
        if not isinstance(piece, Marker):
            ids += tokenizer.encode(piece, allow_special=False)
            continue
        marker_id = tokenizer.token_id(piece)
        if marker_id is None:
            raise ValueError(
                f"Encoding a chat: the format needs the special token {str(piece)!r}, which the tokenizer from "
                f"{tokenizer.source} does not have. Use the tokenizer.json of the release, or skip the chat format "
                "and give raw text or token ids."
            )
        ids.append(marker_id)
    return EncodedPrompt(ids, [image for turn in turns for image in turn.images])


def _prompt_pieces(turns: list[_Turn], mode: str, effort: int | str, keep_reasoning: bool) -> Iterator[str]:
    _check_mode(mode)
    level = _effort_level(effort)
    thinking = mode == "thinking"
    # Reasoning before this turn is dropped. A tool result is a user turn, and a system message also asks for an
    # answer. ours: an assistant turn after it keeps its reasoning although no tools are declared, as the official
    # tests want; DeepSeek's prompt library drops it there. The two differ only if the history ends with that turn,
    # and dropping would take the reasoning out of a turn that is still open.
    last_request = max(index for index, turn in enumerate(turns) if turn.role in ("user", "system"))

    yield BOS
    if thinking:
        yield SYSTEM
        yield _EFFORT_LINE.format(level)
    for index, turn in enumerate(turns):
        opens_thinking = thinking and (keep_reasoning or index >= last_request)
        after_task = index > 0 and turns[index - 1].task is not None
        if turn.role == "assistant":
            if not after_task:  # the answer to a quick task follows the task marker directly and has no reasoning
                yield ASSISTANT
                if opens_thinking:
                    yield THINK
                    yield turn.reasoning
                yield END_THINK
            yield from turn.body
            yield EOS
        else:
            if not (turn.role == "system" and index == 0 and thinking):  # the effort line has brought the marker
                yield {"system": SYSTEM, "user": USER, "latest_reminder": REMINDER}[turn.role]
            yield from turn.body
        if turn.task == "action":
            yield ASSISTANT
            yield THINK if opens_thinking else END_THINK
        if turn.task is not None:
            yield Marker(f"<｜{turn.task}｜>")
    if turns[-1].role in ("user", "system") and turns[-1].task is None:
        yield ASSISTANT
        yield THINK if thinking else END_THINK


def _read_messages(
    messages: Sequence[dict], tools: Sequence[dict] | None, drop_thinking: bool
) -> tuple[list[_Turn], bool]:
    """The turns, and whether all reasoning stays (tools are declared, or dropping is off)."""
    if isinstance(messages, (str, dict)) or not messages:
        raise ValueError(
            f"Reading the messages: expected a list such as [{{'role': 'user', 'content': 'Hello'}}], got "
            f"{_short(messages)}."
        )
    messages = list(messages)
    for index, message in enumerate(messages):
        _check_message(index, message)
    if tools:
        first = messages[0] if messages[0]["role"] == "system" else None
        if first and first.get("tools"):
            raise ValueError(
                "Declaring tools: got the argument `tools` and `tools` in the first system message; use one of them."
            )
        messages[: 1 if first else 0] = [{"role": "system", "content": "", **(first or {}), "tools": tools}]

    groups: list[list[dict]] = []  # neighboring user and tool messages together; a task ends its group
    for message in messages:
        last = groups[-1][-1] if groups else {}
        if {message["role"], last.get("role")} <= {"user", "tool"} and not last.get("task"):
            groups[-1].append(message)
        else:
            groups.append([message])

    turns: list[_Turn] = []
    call_ids: list[str | None] = []  # of the latest assistant message
    for group in groups:
        message, role = group[0], group[0]["role"]
        if role in ("user", "tool"):
            turns.append(_user_turn(group, call_ids))
        elif role == "assistant":
            turns.append(_assistant_turn(message))
            call_ids = [call.get("id") for call in message.get("tool_calls") or []]
        elif role == "latest_reminder":
            turns.append(_Turn(role, [_text_of(message)]))
        else:
            body = [_text_of(message)]
            if message.get("tools"):
                body += ["\n\n", *_tools_block(message["tools"])]
            if any(body):  # an empty system message leaves no trace
                turns.append(_Turn(role, body))
    _check_order(turns)
    return turns, not drop_thinking or any(message.get("tools") for message in messages)


def _check_message(index: int, message: Any) -> None:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLE_KEYS:
        raise ValueError(
            f"Reading message {index}: expected a dict whose role is one of {', '.join(_ROLE_KEYS)}, got "
            f"{_short(message)}. Instructions for the model have the role system."
        )
    known = {"role", "content"} | _ROLE_KEYS[role]
    # Fields that clients send empty (refusal, audio, ...) pass; a filled one that is ignored would change the meaning.
    unknown = [key for key, value in message.items() if key not in known and value not in (None, [], {}, "")]
    if unknown:
        raise ValueError(
            f"Reading message {index} ({role}): the prompt format has no place for {', '.join(map(str, unknown))}. "
            f"A {role} message may have: {', '.join(sorted(known))}."
        )
    task = message.get("task")
    allowed = {"user": TASKS[:-1], "assistant": TASKS[-1:]}.get(role, ())
    if task is not None and task not in allowed:
        raise ValueError(
            f"Reading message {index} ({role}): expected a task out of {', '.join(allowed)}, got {task!r}. The task "
            "title belongs to an assistant message, all others to a user message."
        )


def _check_order(turns: list[_Turn]) -> None:
    """ours: refuse orders of turns for which the format defines no text."""
    if not turns:
        raise ValueError("Reading the messages: they hold no text at all. Add a user message.")
    for index, turn in enumerate(turns):
        before = turns[index - 1] if index else None
        after = turns[index + 1].role if index + 1 < len(turns) else None
        if turn.role == "assistant" and not (before and (before.task or before.role in ("user", "system"))):
            raise ValueError(
                "Reading the messages: an assistant message must answer a user, tool or system message, but this one "
                f"follows {before.role if before else 'nothing'}: {_short(''.join(turn.body))}. Merge neighboring "
                "assistant messages, or put the user's message before it."
            )
        if turn.task and after not in (None, "assistant"):
            raise ValueError(
                f"Reading the messages: the message with task {turn.task!r} must be the last one, or be followed by "
                f"the assistant's answer to the task; it is followed by {after}."
            )
        if turn.role == "latest_reminder" and after not in ("user", "latest_reminder"):
            raise ValueError(
                "Reading the messages: a latest_reminder stands before the user message it belongs to; this one is "
                f"followed by {after or 'nothing'}."
            )


def _user_turn(messages: Sequence[dict], call_ids: Sequence[str | None]) -> _Turn:
    """Text, images and tool results of neighboring messages, an empty line between them, results in call order."""
    parts: list[list[str]] = []
    images: list[Any] = []
    result_slots: list[int] = []
    positions: list[int] = []
    for message in messages:
        if message["role"] == "tool":
            positions.append(_call_position(message, call_ids, positions))
            result_slots.append(len(parts))
            parts.append(["<tool_result>", _text_of(message), "</tool_result>"])
            continue
        for block in _blocks_of(message):
            if "text" in block:
                for spelling in _IMAGE_SPELLINGS:
                    if spelling in block["text"]:
                        raise ValueError(
                            f"Reading a user message: its text contains the image placeholder {spelling!r}. Give the "
                            "image as a content block of its own, or remove the placeholder from the text."
                        )
                parts.append([block["text"]])
            else:
                parts.append([IMAGE])
                images.append(block["image"])
    by_call = sorted(zip(positions, [parts[slot] for slot in result_slots]), key=lambda pair: pair[0])
    for slot, (_, part) in zip(result_slots, by_call):
        parts[slot] = part
    body = [piece for part in parts for piece in ["\n\n", *part]][1:]
    return _Turn("user", body, task=messages[-1].get("task"), images=images)


def _call_position(message: dict, call_ids: Sequence[str | None], taken: Sequence[int]) -> int:
    """Which call of the latest assistant message a tool message answers; without any ids, the next one."""
    wanted = message.get("tool_call_id")
    if wanted is None and not any(call_ids):
        position = len(taken)
    else:
        position = list(call_ids).index(wanted) if wanted in call_ids else len(call_ids)
    if position >= len(call_ids) or position in taken:
        raise ValueError(
            "Reading a tool message: expected one result for each call of the latest assistant message (ids "
            f"{list(call_ids)}), got tool_call_id {wanted!r} after {len(taken)} results. Give every call an id and "
            "every result the tool_call_id of its call."
        )
    return position


def _assistant_turn(message: dict) -> _Turn:
    reasonings = [message[key] for key in ("reasoning_content", "reasoning") if message.get(key)]
    if any(not isinstance(text, str) or text != reasonings[0] for text in reasonings):
        raise ValueError(f"Reading an assistant message: expected one reasoning text, got {_short(reasonings)}.")
    if message.get("content") is None:  # usual beside tool calls
        message = {**message, "content": ""}
    body = [_text_of(message)]
    calls = [] if message.get("tool_calls") is None else message["tool_calls"]
    if not isinstance(calls, list):
        raise ValueError(f"Reading tool calls: expected a list, got {_short(calls)}.")
    ids = [call["id"] for call in calls if isinstance(call, dict) and call.get("id") is not None]
    if any(ids.count(call_id) > 1 for call_id in ids):
        raise ValueError(f"Reading tool calls: expected a different id for each call, got {ids}.")
    if calls:
        body += ["\n\n", *_template("<｜DSML｜ calls>\n")]
        for call in calls:
            body += _call_pieces(call)
        body += _template("</｜DSML｜ calls>")
    reasoning = reasonings[0] if reasonings else ""
    return _Turn("assistant", _merge_text(body), reasoning=reasoning, task=message.get("task"))


def _call_pieces(call: Any) -> list[str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(
            "Reading a tool call: expected {'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': "
            f"...}}}}, got {_short(call)}."
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _load_json(arguments, "Reading the arguments of a tool call")
    if not isinstance(arguments, dict):
        raise ValueError(f"Reading the arguments of a tool call: expected a JSON object, got {_short(arguments)}.")
    pieces = [*_template("<｜DSML｜ invoke name=\""), _name(function.get("name")), '">\n']
    for name, value in arguments.items():
        is_string = isinstance(value, str)
        pieces += [
            *_template("<｜DSML｜ parameter name=\""), _name(name), f'" string="{"true" if is_string else "false"}">',
            value if is_string else _dump_json(value, f"Writing the argument {name!r} of a tool call"),
            *_template("</｜DSML｜ parameter>\n"),
        ]
    return pieces + [*([] if arguments else ["\n"]), *_template("</｜DSML｜ invoke>\n")]


def _tools_block(tools: Sequence[dict]) -> list[str]:
    schemas = []
    for tool in tools if isinstance(tools, (list, tuple)) else [tools]:
        schema = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
            raise ValueError(
                "Declaring tools: expected a list of {'type': 'function', 'function': {'name': ..., 'description': "
                f"..., 'parameters': ...}}}}, got {_short(tool)}."
            )
        schemas.append(_dump_json(schema, f"Declaring the tool {schema['name']!r}"))
    return [*_template(_TOOLS_BLOCK_HEAD), "\n".join(schemas), _TOOLS_BLOCK_TAIL]


def _text_of(message: dict) -> str:
    blocks = _blocks_of(message)
    if any("image" in block for block in blocks):
        raise ValueError(
            f"Reading a {message['role']} message: the format has images in user messages only. Send the image in a "
            "user message after it."
        )
    return "\n\n".join(block["text"] for block in blocks)


def _blocks_of(message: dict) -> list[dict]:
    """The content as {"text": str} and {"image": reference} blocks."""
    content = message.get("content")
    blocks = []
    for block in content if isinstance(content, (list, tuple)) else [{"type": "text", "text": content}]:
        kind = block.get("type") if isinstance(block, dict) else None
        value = block.get(kind) if kind in ("text", "image", "image_url") else None
        if kind == "image_url" and isinstance(value, dict):
            value = value.get("url")
        if value is None or (kind == "text" and not isinstance(value, str)):
            raise ValueError(
                f"Reading a {message['role']} message: expected content that is a string or a list of "
                "{'type': 'text', 'text': ...}, {'type': 'image', 'image': ...} and {'type': 'image_url', 'image_url': "
                f"{{'url': ...}}}} blocks, got {_short(block if isinstance(content, (list, tuple)) else content)}."
            )
        blocks.append({"text" if kind == "text" else "image": value})
    return blocks


def _effort_level(effort: int | str) -> int:
    named = dict(EFFORTS)
    if isinstance(effort, str) and effort in named:
        return named[effort]
    if type(effort) is int and 1 <= effort <= 100:  # not isinstance: True is an int
        return effort
    raise ValueError(
        f"Setting the reasoning effort: expected a whole number 1..100 or one of {', '.join(named)}, got {effort!r}. "
        "For no reasoning at all use mode 'chat'."
    )


# ------------------------------------------------------------------------------------------- a completion to a message

_OPEN_CALLS = re.compile(r" calls>\n<")
_OPEN_INVOKE = re.compile(r' invoke name="([^"]+)">\n(<|\n</)')
_OPEN_PARAMETER = re.compile(r' parameter name="([^"]+)" string="(true|false)">(.*)</', re.DOTALL)
_CLOSE_PARAMETER = re.compile(r" parameter>\n(</?)")
_CLOSE_INVOKE = re.compile(r" invoke>\n(</?)")
_CLOSE_CALLS = re.compile(r" calls>")


def parse_completion(
    completion: str | Sequence[int], mode: str = "thinking", tokenizer: Tokenizer | None = None, ended: bool = True
) -> dict:
    """The assistant message in what the model wrote after the prompt.

    completion: token ids (give their `tokenizer`), which tell markers from text that looks like them; or a string, in
    which every marker counts as one. mode: that of the prompt. ended: False when the end marker may be missing because
    generation was cut, or because the caller took it off.

    Returns {"role", "content", "reasoning_content", "tool_calls"}, the first three str, the last a list of
    {"type": "function", "function": {"name", "arguments": JSON text}}. Blanks and newlines are kept exactly.
    Raises ValueError for output that does not follow the format; nothing is repaired.
    """
    _check_mode(mode)
    if isinstance(completion, str):
        pieces = _template(completion)
    elif tokenizer is None:
        raise ValueError("Parsing a completion given as token ids: the tokenizer is needed too.")
    else:
        pieces = _pieces_of_ids(completion, tokenizer)
    texts, markers = _texts_between_markers(pieces)  # texts[i] stands before markers[i]; one more text than markers

    if markers and markers[-1] == EOS and not texts[-1]:
        texts, markers = texts[:-1], markers[:-1]
    elif ended:
        raise ValueError(
            f"Parsing a completion: expected {str(EOS)!r} at its end, found {_short(''.join(pieces)[-60:])}. If "
            "generation was cut by its length limit, pass ended=False."
        )
    reasoning = ""
    if mode == "thinking":
        if not markers or markers[0] != END_THINK:
            raise ValueError(
                f"Parsing a completion in thinking mode: expected the reasoning to end with {str(END_THINK)!r}, found "
                f"{str(markers[0]) if markers else 'no marker'!r} after {len(texts[0])} characters. For a prompt in "
                "chat mode pass mode='chat'."
            )
        reasoning, texts, markers = texts[0], texts[1:], markers[1:]
    stray = [marker for marker in markers if marker != DSML]
    if stray:
        raise ValueError(
            f"Parsing a completion: the answer contains the special token {str(stray[0])!r}, which has no place there."
        )
    content, calls = texts[0], []
    if markers:
        if not content.endswith("\n\n<"):
            raise ValueError(
                f"Parsing tool calls: expected '\\n\\n<｜DSML｜ calls>' after the content, found {_short(content[-40:])} "
                f"before {str(DSML)!r}."
            )
        content, calls = content[: -len("\n\n<")], _parse_calls(texts[1:])
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}


def _parse_calls(tags: Sequence[str]) -> list[dict]:
    """tags: the text after each `｜DSML｜`, up to and with the `<` or `</` before the next one."""
    remaining = iter(tags)

    def take(pattern: re.Pattern, wanted: str) -> re.Match:
        tag = next(remaining, None)
        found = pattern.fullmatch(tag) if tag is not None else None
        if not found:
            hint = "" if tag is None or tag.startswith(" ") else " V4.1 has a space after ｜DSML｜; V4 tags have none."
            arrived = "the end of the completion" if tag is None else f"｜DSML｜{tag[:80]!r}"
            raise ValueError(f"Parsing tool calls: expected {wanted}, found {arrived}.{hint}")
        return found

    take(_OPEN_CALLS, "<｜DSML｜ calls> and a newline")
    calls, more = [], "<"
    while more == "<":
        name, more_arguments = take(_OPEN_INVOKE, '<｜DSML｜ invoke name="..."> and a newline').groups()
        arguments: dict[str, str] = {}
        while more_arguments == "<":
            key, is_string, value = take(
                _OPEN_PARAMETER, '<｜DSML｜ parameter name="..." string="true|false">value</'
            ).groups()
            if key in arguments:
                raise ValueError(f"Parsing tool calls: the call of {name!r} has two values for the argument {key!r}.")
            if is_string == "true":
                value = json.dumps(value, ensure_ascii=False)
            else:
                _load_json(value, f"Parsing the argument {key!r} of the call of {name!r}")  # the text itself is kept
            arguments[key] = value
            more_arguments = take(_CLOSE_PARAMETER, "</｜DSML｜ parameter> and a newline")[1]
        more = take(_CLOSE_INVOKE, "</｜DSML｜ invoke> and a newline")[1]
        text = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
        calls.append({"type": "function", "function": {"name": name, "arguments": "{" + text + "}"}})
    take(_CLOSE_CALLS, "</｜DSML｜ calls>")
    if (rest := next(remaining, None)) is not None:
        raise ValueError(f"Parsing tool calls: expected nothing after </｜DSML｜ calls>, found ｜DSML｜{rest[:80]!r}.")
    return calls


# ------------------------------------------------------------------------------------------------------------- helpers


def _template(text: str) -> list[str]:
    """Pieces of a text whose markers are meant as markers."""
    return [Marker(part) if part in MARKERS else part for part in _MARKER_PATTERN.split(text) if part]


def _merge_text(pieces: Iterator[str] | Sequence[str]) -> list[str]:
    """Join neighboring plain pieces: BPE must see all text between two special tokens at once."""
    texts, markers = _texts_between_markers(pieces)
    merged = [piece for text, marker in zip(texts, [*markers, ""]) for piece in (text, marker)]
    return [piece for piece in merged if piece]


def _texts_between_markers(pieces: Iterator[str] | Sequence[str]) -> tuple[list[str], list[Marker]]:
    """n markers and the n + 1 texts around them."""
    texts: list[list[str]] = [[]]
    markers: list[Marker] = []
    for piece in pieces:
        if isinstance(piece, Marker):
            markers.append(piece)
            texts.append([])
        else:
            texts[-1].append(piece)
    return ["".join(parts) for parts in texts], markers


def _pieces_of_ids(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """A Marker for every special id, one text for every run of ordinary ids."""
    pieces: list[str] = []
    start = 0
    ids = [int(token_id) for token_id in ids]
    for index, token_id in enumerate(ids):
        if token_id in tokenizer.special_ids:
            pieces += [tokenizer.decode(ids[start:index]), Marker(tokenizer.decode([token_id]))]
            start = index + 1
    return pieces + [tokenizer.decode(ids[start:])]


def _check_mode(mode: str) -> None:
    if mode not in ("thinking", "chat"):
        raise ValueError(f"Choosing the prompt mode: expected 'thinking' or 'chat', got {mode!r}.")


def _name(name: Any) -> str:
    """A function or argument name; it is written between double quotes that the format cannot escape."""
    if not isinstance(name, str) or not name or '"' in name:
        raise ValueError(
            f"Reading a tool call: expected a name that is text without a double quote, got {name!r}. The format has "
            "no way to escape one."
        )
    return name


def _load_json(text: str, doing: str) -> Any:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    def no_constant(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:  # the latter: thousands of nested brackets
        raise ValueError(f"{doing}: expected valid JSON, got {_short(text)} ({error}).") from error


def _dump_json(value: Any, doing: str) -> str:
    """official: separators ", " and ": ", non-ASCII characters as they are."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{doing}: expected a value that JSON can hold, got {_short(value)} ({error}).") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
