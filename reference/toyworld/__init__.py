"""A small world with known answers: the corpus, tokenizer and checkpoint of the bundled trained model.

    world.py            the words, what is true in every episode (codes of people), and what is held out for tests
    lines.py            one line of text each: facts and their questions, codes, sums, lists, stories
    pictures.py         pictures of colored shapes, and what can be asked about them
    chats.py            conversations in the official prompt format, with thinking, tool calls and pictures
    corpus.py           episodes: what training and evaluation read
    build_tokenizer.py  the vocabulary in checkpoint/
    configuration.py    the model: every mechanism of the release, small
    eval.py             what the trained model can do, and which mechanism it owes that to
    eval_drafts.py      its drafts, their calibration, and the prefill modes on it
"""
