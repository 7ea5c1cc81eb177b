#!/usr/bin/env python3
"""steps.json as a C++ string, with the source that it quotes: a list [file of ops/hilbert/, text, and, where the
text is not in the line that is meant, text of the first line after it that is] becomes {file, line, code,
first, lines}, the lines from three before it, of number `first`, to three after it."""
import json
import pathlib
import sys
import textwrap


def quoted_line(lines, marker, then=None):
    """Number, from 1, and code of the one line with the marker; with `then`, of the first from there that has it."""
    marked = [i for i, line in enumerate(lines) if marker in line]
    assert len(marked) == 1, f"stands in {len(marked)} lines: {marker}"
    found = next((i for i in range(marked[0], len(lines)) if (then or marker) in lines[i]), None)
    assert found is not None, f"stands nowhere behind {marker}: {then}"
    return found + 1, lines[found].split(" // ")[0].strip()


def quoted(source, file, *text):
    """What stands there; nothing where a line has moved on, which a test says."""
    all_lines = (source / file).read_text().splitlines()
    try:
        line, code = quoted_line(all_lines, *text)
    except AssertionError:
        return None
    first = max(1, line - 3)
    lines = textwrap.dedent("\n".join(all_lines[first - 1:line + 3])).split("\n")
    return {"file": file, "line": line, "code": code, "first": first, "lines": lines}


def main():
    table, source = json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2])
    for step in table["steps"]:
        step.update({kernel: quoted(source, *place) for kernel, place in step.items() if isinstance(place, list)})
    print(f'R"embedded({json.dumps(table, ensure_ascii=False)})embedded"')


if __name__ == "__main__":
    main()
