#!/usr/bin/env python3
"""Prints which characters are letters, numbers and spaces, as examples/train/tasks/vocabulary.cpp has it: where the
class changes, a number 4 gap + class in digits of 5 bits, the lowest first, on characters from '0'; those after which
more follow are 32 higher."""
import sys
import textwrap
import unicodedata

SPACES = {*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}


def kind(code):
    category = unicodedata.category(chr(code))[0]
    return 3 if code in SPACES else 1 if category == "L" else 2 if category == "N" else 0


out, last, begin = "", 0, 0
for code in range(0x110000):
    if kind(code) == last:
        continue
    last = kind(code)
    number, begin = 4 * (code - begin) + last, code
    while number >= 32:
        out += chr(48 + 32 + number % 32)
        number //= 32
    out += chr(48 + number)
print("// Unicode", unicodedata.unidata_version, file=sys.stderr)
print("\n".join(f'R"({line})"' for line in textwrap.wrap(out, 112)))
