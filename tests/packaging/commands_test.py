#!/usr/bin/env python3
"""Every block and every command of the READMEs is run, so that none goes stale; so are the ```cpp blocks of public
headers.

A block is fenced, or indented by four. C++ is compiled as the body of a `main`, all of it at once, and run. Python goes
to the module of this build, where there is one. Lines that begin with a command (COMMAND), in a block or in
`backticks`, are run by a shell in a scratch directory; two blanks end a command, what follows says what it does. All
else shows something, and is only counted. Comments in the Markdown, which readers don't see, help:

    <!-- before: C++ or Python that a block needs to stand alone -->
    <!-- not run: why the next block is left out -->

Long or wide commands run small: SMALL lists each change. LEFT lists the commands in backticks that are not run, with
the reason. Without arguments it judges the tree and then itself: stale things are put into a copy of a page, and each
must be named.
"""
import os, re, shutil, struct, subprocess, sys, tempfile
from pathlib import Path

SRC, BUILD = Path(os.environ['SRC']), Path(os.environ['BUILD'])
ROOMS = ['core', 'ops', 'nn', 'examples', 'tests', 'third_party']
COMMAND = re.compile(r'(?:HILT_[A-Z]+=\S+ '
                     r')*(?:\./run|tests/\S+(?<!\.cpp)(?<!\.h)|meson|ninja|pip|make|c\+\+|cmake)(?: |$)')

# What makes a command small, or lets it stand in a scratch directory: pattern, replacement, reason.
SMALL = [
    (r'\bWORD\b', 'info', 'a word for any'),
    (r'run.py NAME \.\.', 'run.py output_left_in_curve_order', 'one name for any'),
    (r'\bFILE\b', 'text.txt', 'a text of this test'),
    (r'\bDIR\b', 'dir', 'a directory of this test'),
    (r'--from gpt2\b', '--from gpt2 --heads 2', 'the small GPT-2 of tests/nn/golden'),
    (r'--seconds 300', '--seconds 1', 'a second'),
    (r'--width 256', '--width 32 --steps 2', 'two steps of a small model'),
    (r'--width 512 --layers 8', '--width 64 --layers 2', 'it only counts'),
    (r'--context 256 --batch 4 --steps 200', '--context 8 --batch 2 --steps 2', 'as large as that GPT-2 is'),
    (r'--task (ising|life)$', r'\g<0> --steps 2', 'two steps'),
    (r'^\./run train (--t.*)', r'./run train \1 --out "$(mktemp -du -p .)"',
     'no run goes where another went'),
    (r'^\./run train$', './run train --steps 2', 'two steps'),
    (r'^\./run train --resume --out dir$', './run train --steps 1 --schedule constant --out dir && ./run train '
                                           '--resume --out dir --steps 2', 'what there is to resume'),
    (r'^\./run compare$', './run compare --length 256 --repeat 2', 'a short sequence'),
    (r'^\./run ring( --ranks 4)?$', r'./run ring\1 --length 256 --repeat 1', 'a short sequence'),
    (r'^\./run attend$', './run attend --help', 'the files stand elsewhere'),
    (r'--grid G --pattern P', '--grid 8x8 --pattern window2d:4x4', 'values for any'),
    (r'^tests/mutants/run.py', 'tests/mutants/run.py --list', 'names alone: each mutant is a build'),
]
# In C++: text, replacement, reason.
# seconds a command (42 seen beside busy processes) and a compile: no verdict hangs on them
GUARD, COMPILE_GUARD = 420, 600
SMALL_CPP = [('.steps = 1000, .warmup = 50', '.steps = 2, .warmup = 1', 'two steps')]
# Commands that are not run, in blocks or between backticks, and why.
LEFT = {
    r'^\./run (setup|build)\b|^meson (install|setup build|dist)|^c?make ':
        'installs, or compiles for minutes; run_test.sh, embed_test.sh and dist_test.sh do the like',
    r'\./run bench\b': 'measures for minutes',
    r'tests/tools/(measure|compile_seconds)\b': 'measures for minutes',
    r'^\./run docs': 'docs_test.sh does it',
    r'^meson setup --wrap-mode': 'loads sources from the network',
    r'gpu_lane': 'needs a GPU',
    r'tests/bench/peers/': 'needs PyTorch and the benchmarks, and measures for minutes',
    r'tools/aarch64': 'needs a cross compiler, and compiles for minutes',
    r'crash_points\.py': 'takes minutes; the suite has a short form',
}


class Block:
    def __init__(self, path, line, kind, before, left):
        self.path, self.line, self.kind, self.before, self.left, self.lines = path, line, kind, before, left, []

    def __str__(self):
        return f'{self.path}:{self.line}'


def blocks_of(path, text):
    """All blocks of a page, and each `command` as a block of its own."""
    found, before, left, block, fence, blank = [], '', '', None, None, True
    for number, line in enumerate(text.split('\n'), 1):
        if fence:
            if line.strip() == '```':
                fence = block = None
            else:
                block.lines.append(line)
        elif found_fence := re.match(r'```(\w*)', line):
            fence, block = True, Block(path, number + 1, found_fence[1] or 'text', before, left)
            found.append(block)
            before = left = ''
        elif line.startswith('    ') and (blank or block):
            if block is None:
                block = Block(path, number, 'text', before, left)
                found.append(block)
                before = left = ''
            block.lines.append(line[4:])
        elif note := re.match(r'<!-- (before|not run): (.*) -->$', line):
            before, left = (note[2], left) if note[1] == 'before' else (before, note[2])
        else:
            if line.strip():
                block = None
            for span in re.findall(r'`([^`]+)`', line):
                if COMMAND.match(span) and (' ' in span) and span not in ('pip install',):
                    found.append(Block(path, number, 'span', '', ''))
                    found[-1].lines = [span.replace(r'\|', '|')]
        blank = not line.strip()
    return found


def all_blocks(root):
    pages = [root / 'README.md'] + sorted(p for room in ROOMS for p in (root / room).rglob('*.md')
                                          if not re.match(r'third_party/[^/]+/', str(p.relative_to(root))))
    found = [block for page in pages for block in blocks_of(page.relative_to(root), page.read_text())]
    for header in sorted((BUILD / 'include' / 'hilt').rglob('*.h')):
        text = re.sub(r'(?m)^ *///? ?|^(?! *///).*$', '', header.read_text())
        found += [block for block in blocks_of(header.relative_to(BUILD / 'include'), text) if block.kind == 'cpp']
    return found


def small(command):
    for pattern, replacement, _ in SMALL:
        command = re.sub(pattern, replacement, command)
    return command


class Run:
    """One run over the blocks of a tree; failures are collected, then counted."""

    def __init__(self, root):
        self.root, self.failures = root, []
        self.counts = {'C++ blocks': 0, 'Python blocks': 0, 'commands': 0, 'shown': 0, 'left out': 0}
        self.scratch = Path(tempfile.mkdtemp())
        self.told, self.ran = set(), set()

    def fail(self, block, why):
        self.failures.append(f'{block}: {why}')

    def run(self, command, block, timeout=GUARD, **environment):
        shell = ['bash', '-c', command] if isinstance(command, str) else list(map(str, command))
        try:
            done = subprocess.run(shell, cwd=self.scratch, stdin=subprocess.DEVNULL, capture_output=True,
                                  encoding='utf-8', errors='replace',
                                  timeout=timeout,
                                  env={**os.environ, 'HILT_BUILD': str(BUILD), 'NO_COLOR': '1', **environment})
        except subprocess.TimeoutExpired as slow:
            self.fail(block, str(slow))
            return subprocess.CompletedProcess(shell, 1, '', '')
        if done.returncode:
            shown = command if isinstance(command, str) else ' '.join(map(str, command[:1]))
            self.fail(block, f'{shown}: exit status {done.returncode}: {(done.stderr or done.stdout).strip()[-1500:]}')
        return done

    def leave(self, block, why):
        self.counts['left out'] += 1
        self.told.add(f'left out: {block}: {why}')

    def cpp(self, blocks):
        """One file, a function a block, with the lines of the page; compiled once, run once."""
        if not blocks:
            return
        source = '#include <hilt/hilt.h>\n#include <iostream>\n#include <thread>\nusing namespace hilt;\n'
        for i, block in enumerate(blocks):
            body = '\n'.join(block.lines)
            for text, replacement, _ in SMALL_CPP:
                body = body.replace(text, replacement)
            source += f'static void block{i}() {{\n{block.before}\n#line {block.line} "{block.path}"\n{body}\n}}\n'
        calls = ''.join(f'  std::cerr << "{block}\\n";\n  block{i}();\n' for i, block in enumerate(blocks))
        (self.scratch / 'blocks.cpp').write_text(source + '#line 1 "main"\nint main() {\n' + calls + '}\n')
        if not self.run([os.environ['CXX'], '-std=c++20', '-Wall', '-Wextra', '-Wno-unused-variable', '-Werror', '-I',
                         BUILD / 'include', 'blocks.cpp', '-o', 'blocks',
                         '-L', BUILD, '-l:libhilt.so.0.3', '-pthread'], 'C++', timeout=COMPILE_GUARD).returncode:
            self.run(['./blocks'], 'C++', LD_LIBRARY_PATH=str(BUILD))
        self.counts['C++ blocks'] += len(blocks)

    def python(self, blocks):
        """The blocks of one page after each other."""
        python, module = os.environ.get('PYTHON', 'python3'), os.environ.get('MODULE', '')
        if not module or subprocess.run([python, '-c', 'import torch'], capture_output=True).returncode:
            for block in blocks:
                self.leave(block, 'no module of Python or no torch; ./run setup --python')
            return
        package = self.scratch / 'python' / 'hilt'
        package.mkdir(parents=True)
        for part in [*(SRC / 'examples/embed/python/hilt').glob('*.py'), Path(module)]:
            (package / part.name).symlink_to(part)
        text = '\n'.join('\n'.join([block.before, *block.lines]) for block in blocks)
        self.run([python, '-c', text], blocks[0], PYTHONPATH=str(package.parent), PYTHONDONTWRITEBYTECODE='1')
        self.counts['Python blocks'] += len(blocks)

    def command(self, command, block):
        for pattern, why in LEFT.items():
            if re.search(pattern, command):
                return self.leave(block, f'{command}: {why}')
        # not again: what it names is there
        if found := re.match(r'((?:HILT_[A-Z_]+=\S+ )*)\./run test ?(.*)$', command):
            return self.test_exists(found[2].strip("'"), block)
        if command in self.ran:
            return
        self.ran.add(command)
        command = small(command).replace('./run ', f'{os.environ.get("RUN", SRC / "run")} ')
        command = re.sub(r'(^| )(tests/\S+)', rf'\1{SRC}/\2', command)
        self.run(command, block)
        self.counts['commands'] += 1

    def test_exists(self, name, block):
        self.counts['commands'] += 1
        if not name:
            return
        suite = self.run(['meson', 'test', '-C', BUILD, '--list'], block).stdout.split()
        if name == 'quick' or name in suite or f'{name}_1' in suite:  # a long binary is several tests
            return
        if '*' not in name:
            return self.fail(block, f'./run test {name}: the suite has no such test')
        lists = [subprocess.run([binary, '--gtest_list_tests', f'--gtest_filter={name}'], capture_output=True,
                                text=True).stdout
                 for binary in (BUILD / 'tests').glob('*_test') if binary.is_file()]
        if lists and not any('\n  ' in found for found in lists):
            self.fail(block, f'./run test {name}: no test has such a name')

    def shown(self, block):
        """A list of places in the source: `file  function` each; the function must be there. Anything else is only
                                                  shown."""
        self.counts['shown'] += 1
        for line in block.lines:
            if found := re.fullmatch(r'(\S+/\S+\.(?:cpp|h|cu)) +([\w:]+)', line.strip()):
                file = self.root / found[1]
                if not file.is_file() or not re.search(r'\b' + found[2].split('::')[-1] + r'\b', file.read_text()):
                    self.fail(block, f'no {found[2]} in {found[1]}')

    def fixtures(self):
        # of 61 characters, as that GPT-2
        (self.scratch / 'text.txt').write_text((''.join(map(chr, range(48, 108))) + '\n') * 400)
        (self.scratch / 'gpt2').mkdir()
        shutil.copy(SRC / 'tests/nn/golden/gpt2.safetensors', self.scratch / 'gpt2/model.safetensors')
        for name, kind, shape, size in [*((name, '<f4', '(1, 64, 2, 8)', 4 * 64 * 16) for name in 'qkv'),
                                        ('X', '|u1', '(40, 16, 16)', 40 * 16 * 16), ('Y', '|u1', '(40,)', 40)]:
            head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
            head += ' ' * (117 - len(head)) + '\n'
            numbers = bytes(size) if name in 'qkv' else bytes(i % 2 for i in range(size))
            (self.scratch / f'{name}.npy').write_bytes(b'\x93NUMPY\x01\x00' + struct.pack('<H', len(head))
                                                       + head.encode() + numbers)

    def all(self, blocks):
        self.fixtures()
        cpp, python = [], {}
        for block in blocks:
            if block.left:
                self.leave(block, block.left)
            elif block.kind == 'cpp':
                cpp.append(block)
            elif block.kind == 'python':
                python.setdefault(block.path, []).append(block)
            elif block.kind in ('sh', 'span') or block.lines and COMMAND.match(block.lines[0]):
                for line in block.lines:
                    if line.strip():
                        self.command(line.split('  ')[0].strip(), block)
            else:
                self.shown(block)
        self.cpp(cpp)
        for page in python.values():
            self.python(page)
        shutil.rmtree(self.scratch)
        return self


def judges():
    """Stale things in a page of their own; each must be named. Returns what was overlooked."""
    stale = {
        '```cpp\ncheck(tanh(ones(3), 2).numel() == 3);\n```': 'tanh',
        '```cpp\ncheck(false, "it runs");\n```': 'it runs',
        '    ./run info --jsno    what it is': '--jsno',
        'Type `./run atend --help`.': 'atend',
        '    ./run test no_such_test    one binary': 'no_such_test',
        '    ops/hilbert/attention.cpp    no_such_function': 'no_such_function',
    }
    for text, name in stale.items():
        run = Run(SRC).all(blocks_of(Path('stale.md'), 'A page.\n\n' + text + '\n'))
        if not any(name in failure for failure in run.failures):
            yield text
    if Run(SRC).all(blocks_of(Path('well.md'), '<!-- not run: it needs a GPU -->\n\n    ./run info --jsno\n')).failures:
        yield 'not run'


if __name__ == '__main__':
    run = Run(SRC).all(all_blocks(SRC))
    for line in sorted(run.told):
        print(line)
    overlooked = [f'the judge overlooks: {text}' for text in judges()]
    for failure in run.failures + overlooked:
        print('FAILED:', failure, file=sys.stderr)
    print(', '.join(f'{count} {what}' for what, count in run.counts.items()))
    sys.exit(bool(run.failures or overlooked))
