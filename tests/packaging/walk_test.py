#!/usr/bin/env python3
"""The way of q that ops/hilbert/README.md tells is the one that is gone: the stack in the innermost product of a CPU,
taken by tests/ops/hilbert/walk.cpp, frame by frame, those of inlined functions too. No file is entered again once it
was left."""
import os
import pathlib
import re
import subprocess
import sys

FRAMES, NAMES, FILES = 14, 11, 5
LAMBDA = "a lambda"


def told(page):
    """[(file, function)], from the public call to the innermost product: the lines under `The way of q`."""
    part = page.split("## The way of q\n")[1].split("\n## ")[0]
    return [tuple(line.split(maxsplit=1)) for line in part.splitlines() if line.startswith("    ")]


def name_of(function):
    """hilt::detail::OneOp::forward(std::span<..>) is OneOp::forward, without its namespaces."""
    text = function.replace("(anonymous namespace)::", "")
    while text != (shorter := re.sub(r"<[^<>()]*>|\([^<>()]*\)", "", text)):  # arguments, of templates too
        text = shorter
    if "{lambda" in text:
        return LAMBDA
    return re.sub(r"\b(?:[a-z_]+::)+", "", text.removesuffix(" const").split()[-1])


def place_of(file, source):
    """From the root of the tree, also where a compiler cache had the object from another clone of it."""
    parts = [part for part in pathlib.PurePath(file).parts if part not in ("/", "..")]
    ends = (pathlib.Path(*parts[i:]) for i in range(len(parts)))
    return next((str(end) for end in ends if (source / end).is_file()), file)


def stacks(program, source):
    """Those that the program printed, outermost first, each from attention() on."""
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in printed.splitlines()]
    addresses = sorted({address for line in lines for address in line})
    text = subprocess.run(["addr2line", "-a", "-f", "-C", "-i", "-e", program] + addresses, check=True,
                          capture_output=True, text=True).stdout
    frames = {}
    for block in re.split(r"^0x0*(?=[0-9a-f]+$)", text, flags=re.MULTILINE)[1:]:
        address, *pairs = block.splitlines()
        frames[int(address, 16)] = [(place_of(file.rsplit(":", 1)[0], source), name_of(function))
                                    for function, file in zip(pairs[::2], pairs[1::2])]
    for line in lines:
        stack = [frame for address in line for frame in frames[int(address, 16)]][::-1]
        first = [i for i, frame in enumerate(stack) if frame[1] == "attention"]
        if first:
            yield stack[first[0]:]


def wrong(listed, taken):
    """What a list gets wrong of the stacks, if anything."""
    if not listed:
        return "tells no way"
    real = next((stack for stack in taken if stack[-1] == listed[-1]), None)
    if real is None:
        return f"ends in {' '.join(listed[-1])}, where no stack ends"
    for i, (want, got) in enumerate(zip(listed + [("the", "end")] * len(real), real)):
        if want != got:
            return f"frame {i + 1} is {' '.join(got)}, not {' '.join(want)}"
    if len(listed) > len(real):
        return f"goes on after {' '.join(real[-1])}"
    return None


def long(listed):
    files = [file for i, (file, _) in enumerate(listed) if i == 0 or listed[i - 1][0] != file]
    names = [step for step in listed if step[1] != LAMBDA]
    counts = f"{len(listed)} frames, {len(names)} named functions, {len(set(files))} files"
    print(f"the way of q: {counts}")
    return counts if len(listed) > FRAMES or len(names) > NAMES or len(set(files)) > FILES else None


def main():
    source = pathlib.Path(os.environ["SRC"])
    listed = told((source / "ops/hilbert/README.md").read_text())
    taken = list(stacks(sys.argv[1], source))
    found = wrong(listed, taken) or long(listed)
    # The judge: a step that is not there, one too few, two in the other order.
    for false in ([*listed[:2], ("core/tape.h", "apply"), *listed[2:]], listed[:3] + listed[4:],
                  [listed[1], listed[0], *listed[2:]], [listed[0], listed[-1]]):
        if not wrong(false, taken):
            found = found or f"the judge takes a false list for true: {false}"
    if found:
        sys.exit(f"The way of q in ops/hilbert/README.md {found}; its stack:\n" + "\n".join(
            f"    {file:<40}{name}" for file, name in next((s for s in taken if s[-1][1] == "block_rows"), [])))


if __name__ == "__main__":
    main()
