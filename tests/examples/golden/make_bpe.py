#!/usr/bin/env python3
"""Writes bpe.json: a tokenizer that the package `tokenizers` learned from a text drawn here, and its tokens of other
texts. Version 0.23.3 wrote the file that is beside this."""
import json
import random
import unicodedata
from tokenizers import ByteLevelBPETokenizer

WORDS = ("the a cat's dog don't we're I'LL they'll he'd you've I'm 12 3.14 2024 na\u00efve Stra\u00dfe \u6771\u4eac "
         "\u043f\u0440\u0438\u0432\u0435\u0442 \u0939\u093f\u0928\u094d\u0926\u0940 caf\u00e9 !!! ... -- \"quoted\" "
         "(x) e-mail \u00bd \u2167 "
         "\u2460 \U0001f44d\U0001f3fd \u0663\u0664 \u00a0x \u3000y \u2028 'r 'S ''s").split(" ")
random.seed(5)


def piece():
    r = random.random()
    if r < 0.6:
        return random.choice(WORDS)
    if r < 0.75:
        return random.choice([" ", "   ", "\n", "\n\n", "\t ", "\r\n", " \n "])
    if r < 0.85:
        return "".join(random.choice("abcdefgh") for _ in range(random.randint(1, 9)))
    while True:
        c = chr(random.randrange(random.choice([0x80, 0x3000, 0x10000, 0x110000])))
        if unicodedata.category(c) not in ("Cn", "Cs"):
            return c


def draw(n):
    return "".join(piece() + (" " if random.random() < 0.7 else "") for _ in range(n))


text = draw(1500)
tokenizer = ByteLevelBPETokenizer()
tokenizer.train_from_iterator([text], vocab_size=400, min_frequency=2, show_progress=False)
texts = [draw(n) for n in [*range(40), 400]]
json.dump({"learned_from": text, "tokenizer": json.loads(tokenizer.to_str()),
           "texts": [{"text": t, "tokens": tokenizer.encode(t).ids} for t in texts]},
          open("bpe.json", "w"), separators=(",", ":"))
