#!/usr/bin/env python3
"""Hostile surroundings, drawn at random: the programs must end well, or say in one line why not.

    hostile.py BUILD [--seed S] [--count N] [--only CLASS:SEED] [--ends]

Each class draws its cases from a seed (HILT_SEED, else 1): environment variables, descriptors, limits, directories that
others write to, files that change while they are read, checkpoints whose metadata were forged key by key (with
checksums that match), and signals. What comes from outside comes before the n-th call that changes a file, n drawn:
faults.so stops the program there. One seed is the same cases again; a line tells their ends in one number. Where
HILT_DEEP is set, signals come at random moments as well, and time is judged. Whatever happens, a program ends in a
documented exit status, never by a signal it was not sent, never in 70, and an error is one line that says PROG: error:
WHAT. A training that was disturbed goes on to the bytes of one that was not. A failed case prints the flag that plays
it again; the last line counts.
"""
import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

DOCUMENTED = {0, 1, 2, 3, 4, 5, 6, 7, 130}
TINY = ('--layers 1 --heads 1 --width 8 --context 16 --batch 1 --eval-rows 1 --warmup 1 --device cpu --eval-every '
        '1000 --sample-every 0 --tokens 4'.split())
JUNK = ['', ' ', '-1', '0', '1e9', 'nan', '9' * 400, '\x01\x7f', '%s%n', '../..', 'ä', 'true', '0x10', '1.5']
# seconds, a guard that only a program that hangs meets: the slowest case seen took 6.1, beside a load of 12
LIMIT = 120
DEEP = bool(os.environ.get('HILT_DEEP'))


class Wrong(Exception):
    pass


def npy(path, length, heads, dim, draw):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': (1, {length}, {heads}, {dim}), }}"
    header += ' ' * (-(len(header) + 11) % 64) + '\n'
    numbers = (draw.gauss(0, 1) for _ in range(length * heads * dim))
    path.write_bytes(b'\x93NUMPY\x01\x00' + struct.pack('<H', len(header)) + header.encode()
                     + struct.pack(f'<{length * heads * dim}f', *numbers))


class Place:
    """A scratch directory, and how a program is run in it."""

    def __init__(self, shared):
        self.shared, self.root, self.ends = shared, pathlib.Path(tempfile.mkdtemp(dir=shared.scratch)), []

    def command(self, program, *arguments):
        return [str(self.shared.build / 'examples' / program), *map(str, arguments)]

    def run(self, program, *arguments, allowed=DOCUMENTED, env=None, before=None, **more):
        more = {'stdin': subprocess.DEVNULL, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, **more}
        try:
            done = subprocess.run(self.command(program, *arguments), cwd=self.root, timeout=LIMIT, preexec_fn=before,
                                  env={**os.environ, 'HILT_THREADS': '1', **(env or {})}, **more)
        except subprocess.TimeoutExpired:
            raise Wrong(f'{program} takes more than {LIMIT} s') from None
        self.judge(program, done.returncode, done.stderr, allowed)
        return done

    def stopping(self, every, *arguments):
        """A training that stops itself before each `every`-th call that changes a file here; 0: before main()."""
        return subprocess.Popen(self.command('train', *arguments), cwd=self.root, stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                env={**os.environ, 'HILT_THREADS': '1', **self.shared.faults,
                                     'HILT_FAULT_UNDER': str(self.root), 'HILT_FAULT_HOW': 'stop',
                                     'HILT_FAULT_AT': str(every)})

    @staticmethod
    def stands(run):
        """Waits until it has stopped itself, which is true, or is over."""
        return (run.returncode is None and os.waitid(os.P_PID, run.pid,
                                                     os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED)

    @staticmethod
    def let_through(run):
        """Its end, however often it stops."""
        while Place.stands(run):
            run.send_signal(signal.SIGCONT)
        return run.communicate()[1]

    def judge(self, program, status, stderr, allowed=DOCUMENTED):
        self.ends.append((program, status))
        text = (stderr or b'').decode(errors='replace')
        if status not in allowed:
            raise Wrong(f'{program} ends in {status}: {text[-500:]}')
        errors = [line for line in text.splitlines() if ': error: ' in line]
        if status not in (0, 1, 130) and stderr is not None and len(errors) != 1:
            raise Wrong(f'{program} ends in {status} and says {text[-500:]!r}')
        if any(len(line) > 2000 or '\0' in line for line in errors):
            raise Wrong(f'{program}: an error of {max(map(len, errors))} characters')

    def inputs(self, draw):
        for name in 'qkv':
            npy(self.root / f'{name}.npy', 64, 2, 8, draw)
        return ['--q', 'q.npy', '--k', 'k.npy', '--v', 'v.npy', '--order', 'hilbert:8x8', '--pattern', 'window2d:4x4',
                '--out', 'out']

    def any_program(self, draw):
        return draw.choice([('info', []), ('attend', self.inputs(draw)), ('curves', ['--out', 'out', '--grid', '8x8']),
                            ('ring', ['--ranks', '2', '--length', '64', '--heads', '1', '--head-dim', '8']),
                            ('train', [*TINY, '--steps', '2', '--out', 'out']),
                            ('sample', ['--out', self.shared.trained, '--tokens', '4'])])


def environment(place, draw):
    """Variables of ours, and the usual ones, hold anything."""
    names = ['HILT_THREADS', 'HILT_ISA', 'HILT_POOL_BYTES', 'HILT_GPU_POOL_BYTES', 'HILT_TF32', 'HILT_FORCE_ORDER',
             'HILT_ROUTE', 'HILT_DEADLINE',
             'OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'PMIX_RANK', 'LANG', 'LC_ALL', 'TERM', 'COLUMNS', 'TMPDIR', 'HOME',
             'PATH', 'NO_COLOR']
    program, arguments = place.any_program(draw)
    name, value = draw.choice(names), draw.choice(JUNK)
    done = place.run(program, *arguments, env={name: value})
    if done.returncode != 0 and name.split('_')[0] not in done.stderr.decode(errors='replace'):
        raise Wrong(f'{program} with {name}={value!r} does not name it: {done.stderr.decode(errors="replace")}')


def descriptors(place, draw):
    """0, 1 and 2 closed, full, a directory, or a pipe that nobody reads."""
    program, arguments = place.any_program(draw)
    kinds = [draw.choice(['closed', 'full', 'deaf', 'directory', 'as usual']) for _ in range(3)]

    def prepare():
        for d, kind in enumerate(kinds):
            if kind == 'full' and d:
                os.dup2(os.open('/dev/full', os.O_WRONLY), d)
            elif kind == 'directory' and not d:
                os.dup2(os.open('/', os.O_RDONLY), d)
            elif kind == 'deaf' and d:
                r, w = os.pipe()
                os.close(r)
                os.dup2(w, d)
            elif kind == 'closed':
                os.close(d)
    quiet = kinds[2] != 'as usual'
    done = subprocess.run(place.command(program, *arguments), cwd=place.root, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          preexec_fn=prepare, timeout=LIMIT, env={**os.environ, 'HILT_THREADS': '1'})
    # A pipe that nobody reads ends a program that prints, as everywhere, and never a training.
    deaf = 'deaf' in kinds and program != 'train' and done.returncode == -signal.SIGPIPE
    place.judge(program, 0 if deaf else done.returncode, None if quiet else done.stderr)
    for path in place.root.glob('out/*'):
        if path.suffix in ('.jsonl', '.npy', '.json') and b'step 1 ' in path.read_bytes():
            raise Wrong(f'{program} with {kinds} printed into {path.name}')


def limits(place, draw):
    """As batch systems set them."""
    program, arguments = place.any_program(draw)
    mapped = place.shared.mapped(program)
    what, most = draw.choice([(resource.RLIMIT_FSIZE, draw.choice([0, 1, 100, 4096, 60000])),
                              (resource.RLIMIT_NOFILE, draw.randrange(3, 16)),
                              (resource.RLIMIT_AS, mapped + int(2 ** draw.uniform(23, 31))),
                              (resource.RLIMIT_STACK, 256 << 10)])
    def prepare():
        resource.setrlimit(what, (most, most))
    status = subprocess.run(place.command(program, *arguments), cwd=place.root, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=prepare, timeout=LIMIT, env={**os.environ, 'HILT_THREADS': '1'})
    # Below what the loader and its libraries take, nothing of ours runs.
    if status.returncode == 127 and b'error while loading shared libraries' in status.stderr:
        return
    place.judge(program, status.returncode, status.stderr)


def directories(place, draw):
    """Two runs into one directory; or it is moved, removed, replaced while one writes."""
    train = [*TINY, '--steps', '400', '--save-every', '20', '--out', 'run']
    others = draw.choice([0, 1, 2])
    if not others:
        run, deed = place.stopping(draw.randrange(1, 450),
                                   *train), draw.choice(['remove', 'move', 'replace', 'link', 'file'])
        if place.stands(run) and (place.root / 'run').is_dir():
            (place.root / 'run').rename(place.root / 'away')
            if deed == 'remove':
                shutil.rmtree(place.root / 'away')
            elif deed == 'replace':
                (place.root / 'run').mkdir()
            elif deed == 'link':
                (place.root / 'run').symlink_to('away')
            elif deed == 'file':
                (place.root / 'run').write_text('mine')
        stderr = place.let_through(run)
        place.judge('train', run.returncode, stderr)
        return
    # All at once, or the others while the first stands in the middle.
    first = place.stopping(draw.choice([0, draw.randrange(2, 450)]), *train)
    place.stands(first)
    runs = [first, *(place.stopping(0, *train) for _ in range(others))]
    at_once = not (place.root / 'run').exists()
    for run in runs[1:] + runs[:at_once]:
        place.stands(run)
        run.send_signal(signal.SIGCONT)
    ends = []
    for run in runs[::-1]:
        stderr = place.let_through(run)
        Place(place.shared).judge('train', run.returncode, stderr)
        ends.append(run.returncode)
    # whoever is first
    place.ends += [('train', end) for end in ends] if not at_once else [('one of', len(ends), ends.count(0))]
    if ends.count(0) != 1 or not at_once and ends[-1] != 0:
        raise Wrong(f'{len(runs)} runs into one directory end in {ends}')


def changing_files(place, draw):
    """A text that is cut, grown, rewritten or removed while a model trains on it; arrays likewise."""
    text = place.root / 'text'
    text.write_bytes(bytes(draw.randrange(97, 123) for _ in range(20000)))
    run = place.stopping(draw.randrange(1, 150), '--task', 'text', '--text', 'text', *TINY, '--steps', '300',
                         '--save-every', '1000', '--out', 'run')
    for _ in range(draw.choice([1, 3])):
        place.stands(run)
        deed = draw.choice(['cut', 'grow', 'rewrite', 'remove'])
        if deed == 'remove' and text.exists():
            text.unlink()
        elif deed == 'cut' and text.exists():
            os.truncate(text, draw.randrange(20000))
        elif deed == 'grow' and text.exists():
            with text.open('ab') as file:
                file.write(b'more' * draw.randrange(1, 1000))
        else:
            text.write_bytes(b'x' * draw.randrange(1, 40000))
        run.send_signal(signal.SIGCONT)
    stderr = place.let_through(run)
    place.judge('train', run.returncode, stderr)
    began = (place.root / 'run/log.jsonl').exists() and len((place.root / 'run/log.jsonl').read_text().splitlines()) > 1
    if began and not list((place.root / 'run').glob('ckpt-*.safetensors')):
        raise Wrong(f'a text that changed cost all steps: {stderr.decode(errors="replace")}')


def mixed(h, data):
    """The checksum of checkpoints, written again from its description."""
    def mix(h, word):
        h = (h ^ word) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        return h ^ h >> 32
    whole = len(data) // 8 * 8
    for (word,) in struct.iter_unpack('<Q', data[:whole]):
        h = mix(h, word)
    word = len(data) - whole
    for byte in data[whole:]:
        word = (word << 8 | byte) & 0xFFFFFFFFFFFFFFFF
    return mix(h, word)


def forged_metadata(place, draw):
    """Each key of a checkpoint says something else, and the checksums agree."""
    import json
    source = next(iter(sorted(pathlib.Path(place.shared.trained).glob('ckpt-*.safetensors'), reverse=True)))
    content = source.read_bytes()
    size, = struct.unpack('<Q', content[:8])
    header = json.loads(content[8:8 + size])
    said = header['__metadata__']
    key = draw.choice(sorted(k for k in said if not k.startswith('checksum:')))
    value = draw.choice([None, 'x' * 100000, '../../../etc/passwd', '/etc/passwd', '\n', '1048576',
                         '18446744073709551615', '2', 'blocks:64@/etc/passwd', *JUNK])
    if (key, value) == ('config.context', '1048576'):
        value = '4096'  # a million is a configuration like others, whose steps take hours
    if value is None:
        del said[key]
    else:
        said[key] = value
    h = 2
    for k in sorted(said):
        if k != 'checksum:':
            h = mixed(mixed(h, k.encode()), said[k].encode())
    said['checksum:'] = f'{h:016x}'
    text = json.dumps(header, ensure_ascii=False, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    (place.root / 'run').mkdir()
    (place.root / 'run' / source.name).write_bytes(struct.pack('<Q', len(text)) + text + content[8 + size:])
    before = set(place.root.rglob('*'))
    started = time.monotonic()
    place.run('sample', '--out', 'run', '--tokens', '4')
    place.run('train', '--resume', '--out', 'run', '--tokens', '4', allowed={0, 2, 3, 4, 7})  # 7: --lr was forged
    if DEEP and time.monotonic() - started > LIMIT / 4:
        raise Wrong(f'config {key}={value!r:.50} takes {time.monotonic() - started:.0f} s')
    outside = [p for p in set(place.root.rglob('*')) - before if p.parts[len(place.root.parts)] != 'run']
    if outside:
        raise Wrong(f'{key}={value!r:.50} makes {outside}')


def signals(place, draw):
    """Stopped, continued, told to end, killed, before any call that changes a file or before main(); then it goes
    on."""
    steps = ['--steps', '60', '--save-every', '10', '--keep', '9', '--out', 'run']
    for again in range(31):
        resumed = bool(list((place.root / 'run').glob('ckpt-*.safetensors')))
        run = place.stopping(draw.choice([0, *range(1, 80)]),
                             *(['--resume', '--out', 'run', '--tokens', '4'] if resumed else [*TINY, *steps]))
        sent = draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGSTOP])
        place.stands(run)
        if DEEP and draw.random() < 0.5:
            run.send_signal(signal.SIGCONT)
            time.sleep(draw.expovariate(5))
        if again < 30:  # the last is let through
            run.send_signal(sent)
        stderr = place.let_through(run)
        early = {-sent}  # while it does not listen, or by SIGKILL
        if run.returncode in early:
            place.ends.append(('train', run.returncode))
        else:
            place.judge('train', run.returncode, stderr, {0, 2, 130})
        if (place.root / 'run/ckpt-000060.safetensors').exists():
            break
    if (place.root / 'run/ckpt-000060.safetensors').read_bytes() != place.shared.undisturbed:
        raise Wrong('the end differs from that of an undisturbed run')


CLASSES = {f.__name__: f for f in (environment, descriptors, limits, directories, changing_files, forged_metadata,
                                   signals)}
WEIGHTS = {'environment': 6, 'descriptors': 6, 'limits': 6, 'forged_metadata': 8, 'directories': 2, 'changing_files': 2,
           'signals': 1}


class Shared:
    def __init__(self, build, scratch):
        self.build, self.scratch = build.resolve(), scratch
        self.trained = str(scratch / 'trained')
        self.faults = {'LD_PRELOAD': str(self.build / 'tests/hostile/libfaults.so')}
        self.sizes = {}
        place = Place(self)
        place.run('train', *TINY, '--steps', '60', '--save-every', '10', '--keep', '9', '--out', self.trained,
                  allowed={0})
        self.undisturbed = (scratch / 'trained/ckpt-000060.safetensors').read_bytes()
        (scratch / 'trained/ckpt-000060.safetensors').unlink()  # so that --resume has something to do

    def mapped(self, program):
        """Bytes that it has mapped at most when it has said its --help: of what is needed anyway."""
        if program not in self.sizes:
            run = subprocess.Popen([self.build / 'examples' / program, '--help'], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL,
                                   env={**os.environ, **self.faults, 'HILT_FAULT_HOW': 'end'})
            if not Place.stands(run):
                raise Wrong(f'{program} --help does not stand at its end')
            status = pathlib.Path(f'/proc/{run.pid}/status').read_text()
            self.sizes[program] = next(int(line.split()[1]) << 10 for line in status.splitlines()
                                       if line.startswith('VmPeak:'))
            run.send_signal(signal.SIGCONT)
            run.wait()
        return self.sizes[program]


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument('build', type=pathlib.Path)
    parse.add_argument('--seed', type=int, default=int(os.environ.get('HILT_SEED', 1)))
    parse.add_argument('--count', type=int, default=int(os.environ.get('HILT_HOSTILE_COUNT', 300)))
    parse.add_argument('--only')
    parse.add_argument('--ends', action='store_true', help='how each case ends')
    arguments = parse.parse_args()
    cases = [(name, arguments.seed * 1000000 + i) for i, name in
             zip(range(arguments.count), random.Random(arguments.seed).choices(list(WEIGHTS), WEIGHTS.values(),
                                                                               k=arguments.count))]
    print(f'seed {arguments.seed}{", and moments of the clock" if DEEP else ""}')
    if arguments.only:
        name, seed = arguments.only.split(':')
        cases = [(name, int(seed))]
    with tempfile.TemporaryDirectory(prefix='hilt-hostile-') as scratch:
        shared = Shared(arguments.build, pathlib.Path(scratch).resolve())

        def verdict(case):
            name, seed = case
            place, what, began = Place(shared), None, time.monotonic()
            try:
                CLASSES[name](place, random.Random(seed))
            except (Wrong, subprocess.TimeoutExpired) as wrong:
                what = str(wrong)
            finally:
                shutil.rmtree(place.root, ignore_errors=True)
            return case, what, place.ends, time.monotonic() - began
        failed, ends, slowest = 0, [], (0, None)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for (name, seed), what, end, took in pool.map(verdict, cases):
                ends.append(f'{name}:{seed} {end}')
                slowest = max(slowest, (took, f'{name}:{seed}'))
                if arguments.ends:
                    print(ends[-1])
                if what:
                    failed += 1
                    print(f'FAILED: --only {name}:{seed}: {what}')
    print(f'{len(cases)} cases of seed {arguments.seed}: '
          + ', '.join(f'{sum(c[0] == n for c in cases)} {n}' for n in CLASSES))
    print(f'the ends of all: {hashlib.sha256(repr(ends).encode()).hexdigest()[:16]}; the slowest took '
          f'{slowest[0]:.1f} s ({slowest[1]})')
    print(f'{len(cases) - failed} passed, {failed} failed, 0 skipped')
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
