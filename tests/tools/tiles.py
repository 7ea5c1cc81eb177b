#!/usr/bin/env python3
"""tiles.py PAGE DIR: the pictures of the README out of a compare.html, by chromium: tiles.png goes round the steps of
its tiles, an animated PNG that begins with the last tile's gradients; compare.png is that frame alone."""
import pathlib
import struct
import subprocess
import sys
import tempfile
import zlib

SIZE, FIRST, SECONDS = (1120, 470), 21, 1.0
ALONE = """<style>body { overflow: hidden } main > :not(.player), .player .controls, .player .sub { display: none }
main { padding: 14px 24px } .player { margin: 0 } .player * { transition: none !important }</style>
<script>tiles.go(%d)</script></body>"""


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def chunks(png):
    at = 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at:at + 8])
        yield kind, png[at + 8:at + 8 + size]
        at += size + 12


def rows_of(filtered, wide, deep):
    """The rows, red to opacity, of what PNG packs: each row behind the number of its filter."""
    before = bytes(wide * deep)
    for at in range(0, len(filtered), wide * deep + 1):
        kind, row = filtered[at], bytearray(filtered[at + 1:at + 1 + wide * deep])
        for i in range(len(row)) if kind else ():
            left, corner, up = (row[i - deep], before[i - deep], before[i]) if i >= deep else (0, 0, before[i])
            guess = left + up - corner
            nearest = min((left, up, corner), key=lambda x: abs(guess - x))
            row[i] = row[i] + (left, up, (left + up) // 2, nearest)[kind - 1] & 255
        before = bytes(row)
        yield before if deep == 4 else b"".join(before[i:i + 3] + b"\xff" for i in range(0, len(before), 3))


def packed(rows):
    return zlib.compress(b"".join(b"\0" + row for row in rows), 9)


def frame(page, step, scratch):
    """The rows of one step's picture."""
    alone, shot = pathlib.Path(scratch, "alone.html"), pathlib.Path(scratch, "shot.png")
    alone.write_text(page.replace("</body>", ALONE % step))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    subprocess.run(["chromium", *flags, f"--user-data-dir={scratch}/profile", "--virtual-time-budget=3000",
                    f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={shot}", alone.as_uri()], check=True,
                   stderr=subprocess.DEVNULL, timeout=120)
    parts = list(chunks(shot.read_bytes()))
    pixels = zlib.decompress(b"".join(content for kind, content in parts if kind == b"IDAT"))
    fewer = bytes(x & 0xF8 | x >> 5 for x in range(256))  # of 5 bits each, which pack better
    return [row.translate(fewer) for row in rows_of(pixels, SIZE[0], {2: 3, 6: 4}[parts[0][1][9]])]


def changed(old, new):
    """The rows of what differs from the picture before; the rest is transparent."""
    for before, row in zip(old, new):
        yield row if before is None else b"".join(
            row[at:at + 4] if row[at:at + 4] != before[at:at + 4] else bytes(4) for at in range(0, len(row), 4))


def main():
    page, directory = pathlib.Path(sys.argv[1]).read_text(), pathlib.Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as scratch:
        frames = [frame(page, step, scratch) for step in [FIRST, *range(FIRST)]]
    number, before = iter(range(1000)), [None] * SIZE[1]
    header = struct.pack(">IIBBBBB", *SIZE, 8, 6, 0, 0, 0)
    start, end = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header), chunk(b"IEND", b"")
    (directory / "compare.png").write_bytes(start + chunk(b"IDAT", packed(frames[0])) + end)
    moving = start + chunk(b"acTL", struct.pack(">II", len(frames), 0))
    for i, rows in enumerate(frames):
        part = packed(changed(before, rows))
        moving += chunk(b"fcTL", struct.pack(">IIIIIHHBB", next(number), *SIZE, 0, 0, int(1000 * SECONDS), 1000, 0, 1))
        moving += chunk(b"fdAT", struct.pack(">I", next(number)) + part) if i else chunk(b"IDAT", part)
        before = rows
    (directory / "tiles.png").write_bytes(moving + end)


if __name__ == "__main__":
    main()
