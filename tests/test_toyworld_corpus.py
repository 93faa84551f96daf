"""Episodes of the small world, their answers, the held-out split and the tokenizer (reference/toyworld).

Answers are checked by readers of their own: regular expressions over the decoded text, and the pixels of the pictures.
"""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from inference import command
from inference.config import VisionConfig
from inference.encoding import encode_chat, parse_completion
from inference.image_processor import process_image, validate_token_types
from inference.tokenizer import fold_vocabulary
from reference.toyworld import build_tokenizer, chats, corpus, lines, pictures, world
from reference.toyworld.corpus import episode

TOKENIZER = corpus.load_tokenizer()
SPLITS, KINDS = ("train", "test"), ("text", "chat", "picture")
TASKS = {"text": {"retrieval", "memory", "arithmetic", "copy", "reverse"}, "chat": {"chat", "tool"},
         "picture": {"picture"}}
VISION = VisionConfig(patch_size=14, downsample_ratio=3, min_pixels=7056, max_image_tokens=64)
IMAGE_ID = 5


def encode(text):
    return TOKENIZER.encode(text, allow_special=False)


def many(kind, split, count=12, tokens=900):
    return [episode(seed, tokens, split, TOKENIZER, kind=kind) for seed in range(count)]


EPISODES = {(kind, split): many(kind, split) for kind in KINDS for split in SPLITS}
ALL = [(kind, split, found) for (kind, split), group in EPISODES.items() for found in group]


# --- episodes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, None])
@pytest.mark.parametrize("split", SPLITS)
def test_same_arguments_same_episode(kind, split):
    first, again, other = (episode(seed, 400, split, TOKENIZER, kind=kind) for seed in (5, 5, 6))
    assert (first.ids, first.questions, first.token_types) == (again.ids, again.questions, again.token_types)
    assert [image.tobytes() for image in first.images] == [image.tobytes() for image in again.images]
    assert first.ids != other.ids


def test_splits_and_lengths_have_their_own_episodes():
    made = [episode(1, tokens, split, TOKENIZER, kind="text").ids[:60] for tokens in (300, 301) for split in SPLITS]
    assert all(one != two for one, two in itertools.combinations(made, 2))


@pytest.mark.parametrize("tokens", [corpus.SHORTEST, 256, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_is_close_to_the_length_asked_for(kind, tokens):
    for seed in range(8):
        found = episode(seed, tokens, "train", TOKENIZER, kind=kind)
        assert found.ids[0] == 0 and found.kind == kind and found.questions
        if kind == "text":
            assert len(found.ids) == tokens
        else:  # the last turn that fits ends it
            assert tokens - 100 < len(found.ids) <= tokens


def test_kinds_are_mixed():
    kinds = [episode(seed, 128, "train", TOKENIZER).kind for seed in range(200)]
    shares = [kinds.count(kind) / len(kinds) for kind in KINDS]
    np.testing.assert_allclose(shares, corpus.KIND_SHARES, atol=0.1)


@pytest.mark.parametrize("kind, split, found", ALL)
def test_questions_are_in_order_and_apart(kind, split, found):
    end = 1
    for question in found.questions:
        assert end <= question.start < question.end <= len(found.ids)
        end = question.end
    assert {question.task for question in found.questions} <= TASKS[kind]


def test_supervision_is_dense_and_far():
    """Issue text: several questions per 100 tokens, about half of the told answers beyond 64 tokens."""
    distances, questions, tokens = [], 0, 0
    for seed in range(40):
        found = episode(seed, 1024, "train", TOKENIZER, kind="text")
        tokens += len(found.ids)
        questions += len(found.questions)
        distances += [question.distance for question in found.questions if question.distance is not None]
    assert questions / tokens > 0.04
    assert 0.4 < np.mean(np.array(distances) > 64) < 0.65
    assert np.mean(np.array(distances) > 256) > 0.1
    assert min(distances) < 20


@pytest.mark.parametrize("arguments, words", [
    (dict(split="dev"), "train or test"), (dict(kind="video"), "text, chat, picture"),
    (dict(tokens=20), "at least 128")])
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        episode(**{"seed": 0, "tokens": 300, "split": "train", "tokenizer": TOKENIZER, **arguments})


# --- answers in text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_prompt_and_answer_apart_are_the_tokens_of_both_together(split):
    for found in EPISODES["text", split][:5]:
        for question in found.questions:
            prompt, answer = found.ids[1:question.start], found.ids[question.start:question.end]
            assert encode(TOKENIZER.decode(prompt)) == prompt
            assert encode(TOKENIZER.decode(prompt + answer)) == prompt + answer
            assert not TOKENIZER.decode(prompt).endswith((" ", "\n"))


@pytest.mark.parametrize("split", SPLITS)
def test_distance_leads_to_the_place_where_the_value_was_told_last(split):
    for found in EPISODES["text", split]:
        for question in found.questions:
            answer = found.ids[question.start:question.end]
            assert (question.distance is None) == (question.task != "retrieval")
            if question.distance is not None:
                told = question.start - question.distance
                assert 0 < told < question.start and found.ids[told:told + len(answer)] == answer


SENTENCE = re.compile(r"(?:(\w+) keeps the (\w+ \w+) in the|The (\w+ \w+) of (\w+) is in the) (\w+)\.")
PLACE_ASKED = re.compile(r"[Ww]here (?:does (\w+) keep the (\w+ \w+)|is the (\w+ \w+) of (\w+))\?(?: Answer:)?$"
                         r"|Recall the place of the (\w+ \w+) of (\w+):$")


WHERE = re.compile(r"Where (?:does (\w+) keep the (\w+ \w+)|is the (\w+ \w+) of (\w+))\?$")


def place_facts(text):
    """{(who, what): [end in the text of every sentence that tells the place, place]}"""
    facts = {}
    for match in SENTENCE.finditer(text):
        who, what, what2, who2, place = match.groups()
        facts.setdefault((who or who2, what or what2), []).append((match.end(), place))
    return facts


@pytest.mark.parametrize("split", SPLITS)
def test_places_are_told_once_before_they_are_asked_for(split):
    asked = 0
    for found in EPISODES["text", split]:
        facts = place_facts(TOKENIZER.decode(found.ids))
        for question in found.questions:
            prompt = TOKENIZER.decode(found.ids[:question.start])
            if match := PLACE_ASKED.search(prompt):
                who, what, what2, who2, what3, who3 = match.groups()
                told = facts[who or who2 or who3, what or what2 or what3]
                assert len({place for _, place in told}) == 1 and told[0][0] < len(prompt)
                assert TOKENIZER.decode(found.ids[question.start:question.end]) == " " + told[0][1]
                asked += 1
    assert asked > 30


@pytest.mark.parametrize("split", SPLITS)
def test_codes_sums_and_lists_are_right(split):
    codes = {(fact.name, fact.surname): fact.code for fact in world.MEMORY_FACTS}
    seen = set()
    for found in EPISODES["text", split]:
        for question in found.questions:
            prompt = TOKENIZER.decode(found.ids[:question.start])
            answer = TOKENIZER.decode(found.ids[question.start:question.end])
            match question.task:
                case "memory":
                    assert answer == " " + codes[re.search(r"(\w+) (\w+):$", prompt).groups()]
                    # three tokens before a code, and each word of it one: within the n-grams of the Engram memory
                    assert question.end - question.start == 2
                    before = TOKENIZER.decode_each(found.ids[question.start - 3:question.start])
                    assert [text[0] for text in before] == [" ", " ", ":"]
                case "arithmetic":
                    a, operator, b = re.search(r"(\d+) ([+-]) (\d+) =$", prompt).groups()
                    assert int(answer) == (int(a) + int(b) if operator == "+" else int(a) - int(b))
                case "copy" | "reverse":
                    words, order = re.search(r"List: ([\w ]+)\. (Copy|Reverse):$", prompt).groups()
                    assert answer.split() == words.split()[:: 1 if order == "Copy" else -1]
                    assert question.task == order.lower()
            seen.add(question.task)
    assert seen == TASKS["text"]


def test_codes_are_in_no_episode_before_they_are_asked_for():
    for found in EPISODES["text", "train"]:
        text = TOKENIZER.decode(found.ids)
        for match in re.finditer(r"(\w+) (\w+): (\w+ \w+)\.", text):
            name, surname, code = match.groups()
            if (fact := world.MemoryFact(name, surname, code)) in world.MEMORY_FACTS:
                asked = [TOKENIZER.decode(found.ids[1:question.start]) for question in found.questions
                         if question.task == "memory"]
                assert any(prompt.endswith(f"{fact.name} {fact.surname}:") for prompt in asked)


# --- conversations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat", "picture"])
@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_complete_turns(kind, split):
    for found in EPISODES[kind, split]:
        for question in found.questions:
            opening = TOKENIZER.decode(found.ids[question.start - 2:question.start])
            assert opening in ("<｜Assistant｜><think>", "<｜Assistant｜></think>")
            mode = "thinking" if opening.endswith("<think>") else "chat"
            message = parse_completion(found.ids[question.start:question.end], mode, TOKENIZER)
            assert bool(message["reasoning_content"]) == (mode == "thinking")
            assert message["content"] or message["tool_calls"]


def test_a_conversation_has_the_ids_of_a_prompt_of_a_user():
    asked = re.compile(r"<｜begin▁of▁sentence｜><｜User｜>([^<]+)<｜Assistant｜></think>")
    compared = 0
    for seed in range(40):
        found = episode(seed, 128, "train", TOKENIZER, kind="chat")
        prompt = TOKENIZER.decode(found.ids[:found.questions[0].start])
        if match := asked.fullmatch(prompt):
            messages = [{"role": "user", "content": match[1]}]
            assert encode_chat(TOKENIZER, messages, "chat").ids == found.ids[:found.questions[0].start]
            compared += 1
    assert compared > 5


@pytest.mark.parametrize("split", SPLITS)
def test_chat_answers_follow_from_what_was_said(split):
    codes = {f"Code of {fact.name} {fact.surname}: {fact.code}." for fact in world.MEMORY_FACTS}
    seen = dict.fromkeys(("places", "sums", "codes", "calls", "results", "thoughts", "stories"), 0)
    for found in many("chat", split, 60):
        text = TOKENIZER.decode(found.ids)
        facts = place_facts(text)
        seen["stories"] += len(re.findall(r"Tell me a story", text))
        for question in found.questions:
            before = TOKENIZER.decode(found.ids[:question.start])
            answer = TOKENIZER.decode(found.ids[question.start:question.end])
            request = re.split("<｜User｜>", before)[-1].split("<｜Assistant｜>")[0]
            seen["thoughts"] += "</think>" in answer
            if "calls>" in answer:
                assert question.task == "tool"
                seen["calls"] += 1
            elif match := re.fullmatch("<tool_result>(.+)</tool_result>", request):
                assert match[1] + "." in answer and question.task == "tool"
                if sums := re.search(r"What is (\d+ [+-] \d+)\?", before.split("<｜User｜>")[-2]):
                    assert int(re.search(r"It is (\d+)\.", answer)[1]) == eval(sums[1])
                seen["results"] += 1
            elif match := WHERE.search(request):
                who, what, what2, who2 = match.groups()
                told = facts[who or who2, what or what2]
                assert answer.endswith(f"In the {told[0][1]}.<｜end▁of▁sentence｜>") and question.distance > 0
                seen["places"] += 1
            elif match := re.fullmatch(r"What is (\d+ [+-] \d+)\?", request):
                assert answer.endswith(f"It is {eval(match[1])}.<｜end▁of▁sentence｜>")
                seen["sums"] += 1
            elif "code of" in request:
                assert re.search(r"Code of \w+ \w+: \w+ \w+\.", answer)[0] in codes
                seen["codes"] += 1
    assert all(seen.values()), seen


@pytest.mark.parametrize("split", SPLITS)
def test_chat_distance_leads_to_the_value(split):
    checked = 0
    for found in EPISODES["chat", split]:
        for question in found.questions:
            if question.distance is not None:
                pairs = zip(found.ids[question.start:question.end], found.ids[question.start - question.distance:])
                # The value, one or two tokens, is the only part that must agree; its last word is a word of the world.
                assert any(one == other and TOKENIZER.decode([one]).strip() in VALUES for one, other in pairs)
                checked += 1
    assert checked > 50


VALUES = {*world.PLACES, *world.NOUNS, *world.CAST, *world.COLORS, *world.FOODS, *world.DAYS, *map(str, range(61))}


# --- pictures --------------------------------------------------------------------------------------------------


def read_cells(image):
    """{cell name: (color, shape)} of the cells that are not empty, from the pixels alone."""
    pixels = np.asarray(image).astype(int)
    height, width = pixels.shape[:2]
    rows, columns = height // 42, width // 42
    background = pixels[0, 0]
    row_names = ("top", "bottom") if rows == 2 else ("top", "middle", "bottom")
    column_names = ("left", "right") if columns == 2 else ("left", "middle", "right")
    cells = {}
    for row, column in itertools.product(range(rows), range(columns)):
        cell = pixels[row * 42:row * 42 + 42, column * 42:column * 42 + 42]
        painted = (cell != background).any(-1)
        assert not painted[0].any() and not painted[:, 0].any()  # no shape reaches over from another cell
        name = f"{row_names[row]} {column_names[column]}"
        if not painted.any():
            cells[name] = None
            continue
        red, green, blue = cell[painted].mean(0)
        color = ("black" if max(red, green, blue) < 60 else "yellow" if red > 150 and green > 150 else
                 "purple" if red > 100 and blue > 100 else ("red", "green", "blue")[int(np.argmax([red, green, blue]))])
        ys, xs = np.nonzero(painted)
        box = painted[ys.min():ys.max() + 1, xs.min():xs.max() + 1]
        bottom = box[-1].mean()
        shape = ("square" if box.mean() > 0.95 else "circle" if box.mean() > 0.7 else
                 "triangle" if bottom > 0.9 else "cross")
        cells[name] = (color, shape)
    return cells


def right_answer(asked, cells):
    filled = [(name, *content) for name, content in cells.items() if content]
    named = {name: f"A {' '.join(content)}." if content else "Nothing." for name, content in cells.items()}
    if match := re.fullmatch(r"What is at the (.+)\?", asked):
        return named[match[1]]
    if match := re.fullmatch(r"What color is the (\w+)\?", asked):
        (color,) = [color for _, color, shape in filled if shape == match[1]]
        return f"It is {color}."
    if match := re.fullmatch(r"What shape is (\w+)\?", asked):
        (shape,) = [shape for _, color, shape in filled if color == match[1]]
        return f"It is a {shape}."
    if match := re.fullmatch(r"Where is the (\w+ \w+)\?", asked):
        (name,) = [name for name, *content in filled if " ".join(content) == match[1]]
        return f"At the {name}."
    if match := re.fullmatch(r"What is left of the (\w+ \w+)\?", asked):
        (name,) = [name for name, *content in filled if " ".join(content) == match[1]]
        order = list(cells)
        return named[order[order.index(name) - 1]]
    if match := re.fullmatch(r"How many (?:(\w+) )?shapes are there\?", asked):
        return f"I see {sum(match[1] in (None, color) for _, color, _ in filled)}."
    if asked == "Describe the picture.":
        text = ", ".join(f"a {color} {shape} at the {name}" for name, color, shape in filled)
        return f"A{text[1:]}."
    assert asked == "Write a caption.", asked
    (first, *one), (second, *two) = filled
    same = [a == b for a, b in zip(first.split(), second.split())]  # row, column
    return f"A {' '.join(one)} {'left of' if same[0] else 'above' if same[1] else 'and'} a {' '.join(two)}."


@pytest.mark.parametrize("split", SPLITS)
def test_picture_answers_are_what_the_pixels_show(split):
    kinds = set()
    for found in EPISODES["picture", split]:
        spans = [at for at, (token, before) in enumerate(zip(found.ids[1:], found.ids)) if token == IMAGE_ID != before]
        assert len(spans) == len(found.images)
        for question in found.questions:
            image = found.images[sum(at < question.start for at in spans) - 1]
            before = TOKENIZER.decode(found.ids[:question.start]).split("<｜User｜>")[-1].split("<｜Assistant｜>")[0]
            asked = before.replace("<｜deepseek_image｜>", "").strip()
            mode = "thinking" if found.ids[question.start - 1] == TOKENIZER.token_id("<think>") else "chat"
            answer = parse_completion(found.ids[question.start:question.end], mode, TOKENIZER)["content"]
            assert answer == right_answer(asked, read_cells(image)), asked
            kinds.add(" ".join(asked.split()[:2]))
    assert len(kinds) >= 6, kinds


def test_pictures_enter_the_model_as_for_a_user():
    sizes = set()
    for kind, _, found in ALL:
        if kind != "picture":
            assert not found.images and found.token_types is None and IMAGE_ID not in found.ids
            continue
        images = [process_image(image, VISION) for image in found.images]
        validate_token_types(found.ids, found.token_types, images, IMAGE_ID)
        for image, ready in zip(found.images, images):
            assert (ready.patch_cols * 14, ready.patch_rows * 14) == image.size  # nothing is resized
            assert (ready.llm_cols * 42, ready.llm_rows * 42) == image.size
            sizes.add(image.size)
    assert sizes == {(84, 84), (126, 84), (84, 126)}


# --- the split -------------------------------------------------------------------------------------------------


def test_facts_and_sums_of_the_splits_are_disjoint():
    places, sums = {}, {}
    for split in SPLITS:
        texts = [TOKENIZER.decode(found.ids) for kind, part, found in ALL if part == split and kind != "picture"]
        places[split] = {(who, what.split()[-1], told[0][1]) for text in texts
                         for (who, what), told in place_facts(text).items()}
        pairs = [match.groups() for text in texts for match in re.finditer(r"(\d+) ([+-]) (\d+)", text)]
        sums[split] = {(operator, *sorted((int(a), int(b)))) for a, operator, b in pairs}
    for found in (places, sums):
        assert len(found["train"]) > 50 and len(found["test"]) > 20 and not found["train"] & found["test"]


def test_no_relation_has_a_combination_in_both_splits():
    """Drawn often enough that the small relations (food: 512 combinations) come around many times."""
    drawn = {}
    for split in SPLITS:
        rng = lines.random.Random(split)
        facts = [lines.new_fact(rng, world.CAST, split) for _ in range(4000)]
        # The adjective of a thing does not count: "red hat" and "blue hat" are one combination.
        drawn[split] = {(fact.relation.name, *(text.split()[-1] for _, text in fact.slots), fact.value)
                        for fact in facts}
    assert {name for name, *_ in drawn["test"]} == set(lines.RELATIONS)
    assert not drawn["train"] & drawn["test"]


def test_every_test_picture_has_a_combination_that_no_training_picture_has():
    cells = {split: [[(name, content) for name, content in read_cells(image).items() if content]
                     for found in EPISODES["picture", split] for image in found.images] for split in SPLITS}
    trained = {cell for picture in cells["train"] for cell in picture}
    # A name such as "bottom left" is one cell in two rows and another in three, so ask the rule itself as well.
    for split in SPLITS:
        rng = lines.random.Random(3)
        made = [pictures.new_picture(rng, split) for _ in range(300)]
        assert all(any(map(picture.held_out, range(len(picture.cells)))) == (split == "test") for picture in made)
    combinations = list(itertools.product(world.PAINTS, world.SHAPES, range(3), range(3)))
    assert 10 <= sum(itertools.starmap(world.held_out, combinations)) <= 40
    assert len(trained) > 100


def test_a_code_follows_three_tokens_that_all_forms_share():
    """Name, surname and colon are one key of an n-gram memory; the token before them differs between the forms."""
    keys, before = {}, set()
    for found in EPISODES["text", "train"]:
        for question in found.questions:
            if question.task == "memory":
                key = TOKENIZER.decode(found.ids[question.start - 3:question.start])
                keys[key] = TOKENIZER.decode(found.ids[question.start:question.end])
                before.add(found.ids[question.start - 4])
    assert len(keys) > 50 and len(before) > 1
    assert keys.items() <= {(f" {fact.name} {fact.surname}:", f" {fact.code}") for fact in world.MEMORY_FACTS}


def test_codes_are_asked_for_in_other_words():
    forms = {split: {re.sub(r"\w+ \w+:$", "", line[0].text) for line in
                     (lines.memory(lines.random.Random(seed), split) for seed in range(100))} for split in SPLITS}
    assert len(forms["test"]) == 3 and not forms["train"] & forms["test"]


def test_people_with_codes():
    people = [(fact.name, fact.surname) for fact in world.MEMORY_FACTS]
    assert len(set(people)) == len(people) == 1500
    assert world.MEMORY_FACTS[0] == ("Bruno", "Rhys", "red ladder")  # the trained weights know these


# --- the tokenizer ---------------------------------------------------------------------------------------------


def test_the_committed_tokenizer_is_what_the_builder_makes(tmp_path):
    build_tokenizer.build(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (corpus.CHECKPOINT / name).read_bytes()


def test_tokenizer_splits_like_the_others():
    nano = Path(__file__).parents[1] / "reference" / "golden" / "nano" / "checkpoint" / "tokenizer.json"
    toy = corpus.CHECKPOINT / "tokenizer.json"
    ours, theirs = (json.loads(path.read_text(encoding="utf-8")) for path in (toy, nano))
    assert TOKENIZER.vocab_size == 1536
    assert {key for key in ours if ours[key] != theirs[key]} == {"model"}  # special tokens and their ids are the same
    assert fold_vocabulary(TOKENIZER, 1536).max() < 1536


def test_words_of_the_world_are_one_token():
    words = (world.NAMES, world.SURNAMES, world.ADJECTIVES, world.NOUNS, world.PLACES, world.FOODS, world.DAYS,
             world.COUNTS, world.PAINTS, world.SHAPES)
    assert [word for group in words for word in group if len(encode(" " + word)) > 1] == []
    assert [number for number in range(61) if len(encode(str(number))) > 1] == []
    assert encode("Code of Oren Vale: amber fox.")[-6:] == [
        encode(text)[0] for text in (" Oren", " Vale", ":", " amber", " fox", ".")]


def test_any_text_comes_back():
    for text in ("Grüße, 世界! \n\n\t x=1", "Mira keeps the brass key in the barn.\n"):
        assert TOKENIZER.decode(encode(text)) == text


# --- the command -----------------------------------------------------------------------------------------------


def test_command_prints_an_episode_with_its_answers_marked(capsys):
    assert corpus.main(["--seed", "3", "--tokens", "200", "--kind", "text", "--split", "test"]) == 0
    shown = capsys.readouterr().out
    found = episode(3, 200, "test", TOKENIZER, kind="text")
    assert shown.count("[[") == len(found.questions) and f"{len(found.questions)} questions" in shown


@pytest.mark.parametrize("tokens, reason", [("10", "at least 128"), ("99999999999", "at most 1048576")])
def test_command_refuses_lengths(tokens, reason):
    for more in ([], ["--speed"]):
        with pytest.raises(ValueError, match=reason):
            corpus.main(["--kind", "chat", "--tokens", tokens, *more])


def test_command_exits_as_the_others_do():
    with pytest.raises(SystemExit) as stopped:
        corpus.main(["--tokens", "abc"])
    assert stopped.value.code == 3
    assert command.run(lambda: corpus.main(["--tokens", "10"])) == 3


def test_tools_fit_the_format():
    """The declaration is what a user would send; the episodes with tools begin with it."""
    declared = [tool["function"]["name"] for tool in chats.tools()]
    text = "".join(TOKENIZER.decode(found.ids) for found in EPISODES["chat", "train"])
    assert declared == ["get_place", "calculate"] and all(f'invoke name="{name}"' in text for name in declared)
