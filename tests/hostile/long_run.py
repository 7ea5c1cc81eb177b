#!/usr/bin/env python3
"""A long training with a fault every few seconds, beside the same training left alone.

    long_run.py BUILD [--seconds 60] [--every 4] [--seed 1]

Both run at once, a thread each (bits do not depend on how many), for about so many seconds. The one is killed, told to end,
stopped and continued, finds its disk full, or its limits changed: size of a file, descriptors, memory. Whenever it ends it
is resumed. At the end its checkpoint must be that of the other byte for byte, and the losses that its log has, the other's.
The one that is left alone must hold as many descriptors in the second half as in the first, and no more memory. The disk is
a tmpfs, which needs root; without, disks do not fill. The last line counts.
"""
import argparse
import collections
import json
import os
import pathlib
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time

MODEL = '--layers 2 --heads 2 --width 32 --context 64 --batch 2 --eval-rows 4 --warmup 10 --device cpu --keep 2'.split()
SLACK = 512  # KiB, by which a heap's edge wanders
ENDS = {0, 3, 4, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP}  # documented, or sent before it listens


def start(build, where, *more, threads=1):
    log = open(where.parent / (where.name + '.err'), 'ab')
    return subprocess.Popen([build / 'examples/train', '--out', where / 'run', '--tokens', '4', '--prompt', 'a', *more], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                            stderr=log, env={**os.environ, 'HILT_THREADS': str(threads)})


def taken(pid):
    """Descriptors, resident KiB."""
    return len(os.listdir(f'/proc/{pid}/fd')), int(pathlib.Path(f'/proc/{pid}/statm').read_text().split()[1]) * (resource.getpagesize() // 1024)


class Faults:
    """What befalls a run: each waits a while and puts the machine right again."""

    def __init__(self, disk, draw):
        self.disk, self.draw, self.count = disk, draw, collections.Counter()

    def one(self, run):
        names = ['kill', 'end', 'stop', 'file_size', 'descriptors', 'memory'] + ['full_disk'] * os.path.ismount(self.disk)
        name = self.draw.choice(names)
        self.count[name] += 1
        getattr(self, name)(run)

    def kill(self, run):
        run.kill()

    def end(self, run):
        run.send_signal(self.draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))

    def stop(self, run):
        run.send_signal(signal.SIGSTOP)
        time.sleep(self.draw.uniform(0, 2))
        run.send_signal(signal.SIGCONT)

    def full_disk(self, run):
        ballast = self.disk / 'ballast'
        try:
            with ballast.open('wb', buffering=0) as file:
                while file.write(bytes(1 << self.draw.choice([0, 10, 20]))):
                    pass
        except OSError:
            time.sleep(self.draw.uniform(0, 2))
        finally:
            ballast.unlink()

    def limit(self, run, which, low):
        before = resource.prlimit(run.pid, which)
        resource.prlimit(run.pid, which, (low, before[1]))
        time.sleep(self.draw.uniform(0, 2))
        resource.prlimit(run.pid, which, before)

    def file_size(self, run):
        self.limit(run, resource.RLIMIT_FSIZE, self.draw.choice([0, 1000, 100000]))

    def descriptors(self, run):
        self.limit(run, resource.RLIMIT_NOFILE, self.draw.choice([3, taken(run.pid)[0]]))

    def memory(self, run):
        size = int(pathlib.Path(f'/proc/{run.pid}/statm').read_text().split()[0]) * resource.getpagesize()
        self.limit(run, resource.RLIMIT_AS, size + self.draw.choice([-1, 0, 1 << 20]))


def last_of(where, steps):
    return where / 'run' / f'ckpt-{steps:06}.safetensors'


def losses(where):
    lines = (where / 'run/log.jsonl').read_text().splitlines()[1:]
    return {j['step']: j['loss'] for j in map(json.loads, lines)}


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument('build', type=pathlib.Path)
    parse.add_argument('--seconds', type=float, default=float(os.environ.get('HILT_LONG_RUN', 60)))
    parse.add_argument('--every', type=float, default=float(os.environ.get('HILT_FAULT_EVERY', 4)))
    parse.add_argument('--seed', type=int, default=1)
    a = parse.parse_args()
    build = a.build.resolve()
    wrong = []
    with tempfile.TemporaryDirectory(prefix='hilt-long-') as scratch:
        root = pathlib.Path(scratch).resolve()
        alone, disk = root / 'alone', root / 'disk'
        alone.mkdir(), disk.mkdir()
        mounted = os.geteuid() == 0 and subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=256m', 'none', disk], capture_output=True).returncode == 0
        try:
            pair = [start(build, root / name, *MODEL, '--steps', '300') for name in ('one', 'two')]  # how fast two are
            began = time.monotonic()
            if any(run.wait() for run in pair):
                sys.exit((root / 'one.err').read_text())
            steps = max(500, int(300 / (time.monotonic() - began) * a.seconds))
            every = str(max(10, steps // int(max(a.seconds, 10))))  # a checkpoint about every second
            how = [*MODEL, '--steps', str(steps), '--save-every', every, '--sample-every', '0', '--eval-every', str(steps // 4)]
            left, run = start(build, alone, *how), start(build, disk, *how)
            draw = random.Random(a.seed)
            faults, starts, seen, due = Faults(disk, draw), 1, [], time.monotonic() + a.every
            while run.poll() is None or not last_of(disk, steps).exists():
                if left.poll() is None:
                    seen.append(taken(left.pid))
                if run.poll() is not None:
                    if run.returncode not in ENDS or starts > 100 + a.seconds:
                        wrong.append(f'start {starts} ends in {run.returncode}: {(root / "disk.err").read_text()[-500:]}')
                        break
                    begun = list((disk / 'run').glob('ckpt-*.safetensors')) if (disk / 'run').exists() else []
                    run = start(build, disk, *(['--resume'] if begun else how), threads=draw.choice([1, 2]))
                    starts += 1
                elif time.monotonic() > due:
                    try:
                        faults.one(run)
                    except (ProcessLookupError, FileNotFoundError):
                        pass  # it was over
                    due = time.monotonic() + a.every
                time.sleep(0.1)
            left.wait()
            run.kill() if wrong else run.wait()
            if not wrong:
                if last_of(alone, steps).read_bytes() != last_of(disk, steps).read_bytes():
                    wrong.append('the last checkpoints differ')
                want, got = losses(alone), losses(disk)
                if len(want) != steps or not got.items() <= want.items():
                    wrong.append(f'the logs differ: {[(s, x, want.get(s)) for s, x in got.items() if want.get(s) != x][:3]}')
                if len(got) < len(want) and 'log.jsonl' not in (root / 'disk.err').read_text(errors='replace'):
                    wrong.append('the log lacks lines, and nobody said so')
                print(f'{steps} steps, {sum(faults.count.values())} faults ({", ".join(f"{n} {k}" for k, n in sorted(faults.count.items()))}), {starts} starts, '
                      f'{len(got)} of {len(want)} lines in the log')
            settled = seen[len(seen) // 10:]
            halves = settled[:len(settled) // 2], settled[len(settled) // 2:]
            # Medians: a look may fall into a save, which has a file more open.
            descriptors, resident = [[statistics.median(x[i] for x in half) for half in halves] for i in (0, 1)]
            print(f'left alone: {descriptors[0]} and {descriptors[1]} descriptors, {resident[0]} and {resident[1]} KiB in the halves of its time, by medians')
            if descriptors[1] > descriptors[0] or resident[1] > resident[0] + SLACK:
                wrong.append('what it takes grows')
        finally:
            if mounted:
                subprocess.run(['umount', '-l', disk], check=False)
    for what in wrong:
        print(f'FAILED: {what}')
    print(f'{2 - len(wrong)} passed, {len(wrong)} failed, 0 skipped')
    return bool(wrong)


if __name__ == '__main__':
    sys.exit(main())
