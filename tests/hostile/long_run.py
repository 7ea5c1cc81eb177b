#!/usr/bin/env python3
"""A training with a fault every few calls, beside the same training left alone.

    long_run.py BUILD [--steps 240] [--faults 42] [--seed S]
    HILT_DEEP=1 long_run.py BUILD [--seconds 60] [--every 4] [--seed S]

The one is killed, told to end, stopped and continued, finds its disk full, or its limits changed: size of a file,
descriptors, memory. Whenever it ends it is resumed. At the end its checkpoint must be that of the other byte for byte,
and the losses that its log has, the other's. The one that is left alone must hold as many descriptors in the last
quarter as in the first. The short form hangs on no clock: faults.so stops a run before every n-th call that changes a
file, n is drawn from the seed (HILT_SEED, else 1), and a fault lasts to the next stop; after so many faults the run is
let through. The moments of one seed are the same again; whether a full disk still takes a line hangs on its digits. The
long form, where HILT_DEEP is set, goes by time, for about so many seconds (HILT_LONG_RUN), a fault every few
(HILT_FAULT_EVERY); there the memory of its own that the one left alone has must not rise from quarter to quarter. The
disk is a tmpfs, which needs root and leave to mount; without, disks do not fill, and a line says so. The last line
counts.
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
SLACK = 1024  # KiB
# documented, or sent while it does not listen
ENDS = {0, 3, 4, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT}
DEEP = bool(os.environ.get('HILT_DEEP'))


def start(build, where, *more, threads=1, stop_every=0):
    env = {**os.environ, 'HILT_THREADS': str(threads)}
    if stop_every:
        env.update(LD_PRELOAD=str(build / 'tests/hostile/libfaults.so'), HILT_FAULT_UNDER=str(where),
                   HILT_FAULT_HOW='stop', HILT_FAULT_AT=str(stop_every))
    with open(where.parent / (where.name + '.err'), 'ab') as log:
        return subprocess.Popen([build / 'examples/train', '--out', where / 'run', '--tokens', '4', '--prompt', 'a',
                                 *more], stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=log, env=env)


def stands(run):
    """Waits until it has stopped itself, which is true, or is over."""
    # send_signal() may have collected it.
    return (run.returncode is None and os.waitid(os.P_PID, run.pid,
                                                 os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED)


def taken(pid):
    """Descriptors, resident KiB that are no file's: of those the kernel takes and gives as it likes."""
    resident, shared = (int(x) for x in pathlib.Path(f'/proc/{pid}/statm').read_text().split()[1:3])
    return len(os.listdir(f'/proc/{pid}/fd')), (resident - shared) * (resource.getpagesize() // 1024)


class Faults:
    """What befalls a run: each begins, and gives what puts the machine right again, or nothing."""

    def __init__(self, disk, draw):
        self.disk, self.draw, self.count, self.next = disk, draw, collections.Counter(), []

    def one(self, run):
        if not self.next:  # each as often as the others
            self.next = (['kill', 'end', 'stop', 'file_size', 'descriptors', 'memory']
                         + ['full_disk'] * os.path.ismount(self.disk))
            self.draw.shuffle(self.next)
        name = self.next.pop()
        self.count[name] += 1
        return getattr(self, name)(run)

    def kill(self, run):
        run.kill()

    def end(self, run):
        run.send_signal(self.draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))

    def stop(self, run):
        run.send_signal(signal.SIGSTOP)
        return lambda: run.send_signal(signal.SIGCONT)

    def full_disk(self, run):
        ballast = self.disk / 'ballast'
        try:
            with ballast.open('wb', buffering=0) as file:
                while file.write(bytes(1 << self.draw.choice([0, 10, 20]))):
                    pass
        except OSError:
            pass
        return ballast.unlink

    def limit(self, run, which, low):
        before = resource.prlimit(run.pid, which)
        resource.prlimit(run.pid, which, (low, before[1]))
        return lambda: resource.prlimit(run.pid, which, before)

    def file_size(self, run):
        return self.limit(run, resource.RLIMIT_FSIZE, self.draw.choice([0, 1000, 100000]))

    def descriptors(self, run):
        return self.limit(run, resource.RLIMIT_NOFILE, self.draw.choice([3, taken(run.pid)[0]]))

    def memory(self, run):
        # A stack that cannot grow is SIGSEGV, whoever asks: what it may still grow by is left to it.
        size = int(pathlib.Path(f'/proc/{run.pid}/statm').read_text().split()[0]) * resource.getpagesize()
        stack = resource.prlimit(run.pid, resource.RLIMIT_STACK)[0]
        margin = stack if 0 <= stack < 1 << 26 else 8 << 20
        return self.limit(run, resource.RLIMIT_AS, size + margin + self.draw.choice([0, 1 << 16, 1 << 20]))


def righted(undo):
    """Ends a fault; whom it befell may be over."""
    try:
        if undo:
            undo()
    except ProcessLookupError:
        pass


class Pair:
    """The run that faults befall, on its disk, and the one that is left alone."""

    def __init__(self, build, alone, disk, how, faults):
        self.build, self.alone, self.disk, self.how, self.faults, self.draw = (build, alone, disk, how, faults,
                                                                               faults.draw)
        self.starts, self.seen = 0, []

    def again(self, **more):
        self.starts += 1
        begun = list((self.disk / 'run').glob('ckpt-*.safetensors')) if (self.disk / 'run').exists() else []
        return start(self.build, self.disk, *(['--resume'] if begun else self.how), threads=self.draw.choice([1, 2]),
                     **more)

    def ended_wrong(self, run, most):
        if run.returncode not in ENDS or self.starts > most:
            return f'start {self.starts} ends in {run.returncode}: {self.disk.with_name("disk.err").read_text()[-500:]}'
        return None

    def by_calls(self, last, most):
        """Both stand still at every fault and every look. What is wrong, or none."""
        left = start(self.build, self.alone, *self.how, stop_every=7)
        while stands(left):
            self.seen.append(taken(left.pid))
            left.send_signal(signal.SIGCONT)
        left.wait()
        while not last.exists():
            run, undo = self.again(stop_every=self.draw.randrange(5, 60)), None
            while stands(run):
                righted(undo)
                undo = self.faults.one(run) if sum(self.faults.count.values()) < most else None
                run.send_signal(signal.SIGCONT)
            run.wait()
            righted(undo)
            if wrong := self.ended_wrong(run, 300):
                return wrong
        return None

    def by_time(self, last, seconds, every):
        left, run, due = start(self.build, self.alone, *self.how), self.again(), time.monotonic() + every
        while run.poll() is None or not last.exists():
            if left.poll() is None:
                self.seen.append(taken(left.pid))
            if run.poll() is not None:
                if wrong := self.ended_wrong(run, 100 + seconds):
                    left.wait()
                    return wrong
                run = self.again()
            elif time.monotonic() > due:
                try:
                    undo = self.faults.one(run)
                    if undo:
                        time.sleep(self.draw.uniform(0, 2))
                    righted(undo)
                except (ProcessLookupError, FileNotFoundError):
                    pass  # it was over
                due = time.monotonic() + every
            time.sleep(0.1)
        left.wait()
        return None


def last_of(where, steps):
    return where / 'run' / f'ckpt-{steps:06}.safetensors'


def losses(where):
    lines = (where / 'run/log.jsonl').read_text().splitlines()[1:]
    return {j['step']: j['loss'] for j in map(json.loads, lines)}


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument('build', type=pathlib.Path)
    parse.add_argument('--steps', type=int, default=240)
    parse.add_argument('--faults', type=int, default=42)
    parse.add_argument('--seconds', type=float, default=float(os.environ.get('HILT_LONG_RUN', 60)))
    parse.add_argument('--every', type=float, default=float(os.environ.get('HILT_FAULT_EVERY', 4)))
    parse.add_argument('--seed', type=int, default=int(os.environ.get('HILT_SEED', 1)))
    a = parse.parse_args()
    build = a.build.resolve()
    wrong = []
    print(f'seed {a.seed}, {"by time" if DEEP else "by calls"}')
    with tempfile.TemporaryDirectory(prefix='hilt-long-') as scratch:
        root = pathlib.Path(scratch).resolve()
        alone, disk = root / 'alone', root / 'disk'
        alone.mkdir(), disk.mkdir()
        mounted = (os.geteuid() == 0 and subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=256m', 'none', disk],
                                                        capture_output=True).returncode == 0)
        if not mounted:
            print('left out: full_disk, nothing can be mounted here')
        try:
            steps, saves = a.steps, 20
            if DEEP:
                # how fast two are
                trial = [start(build, root / name, *MODEL, '--steps', '300') for name in ('one', 'two')]
                began = time.monotonic()
                if any([run.wait() for run in trial]):
                    sys.exit((root / 'one.err').read_text())
                steps = max(500, int(300 / (time.monotonic() - began) * a.seconds))
                saves = max(10, steps // int(max(a.seconds, 10)))  # a checkpoint about every second
            how = [*MODEL, '--steps', str(steps), '--save-every', str(saves), '--sample-every', '0', '--eval-every',
                   str(steps // 4)]
            faults = Faults(disk, random.Random(a.seed))
            pair = Pair(build, alone, disk, how, faults)
            last = last_of(disk, steps)
            if what := pair.by_time(last, a.seconds, a.every) if DEEP else pair.by_calls(last, a.faults):
                wrong.append(what)
            else:
                if last_of(alone, steps).read_bytes() != last.read_bytes():
                    wrong.append('the last checkpoints differ')
                if not DEEP and len(faults.count) < 6 + mounted:
                    wrong.append(f'only {sorted(faults.count)} befell the run')
                want, got = losses(alone), losses(disk)
                if len(want) != steps or not got.items() <= want.items():
                    apart = [(s, x, want.get(s)) for s, x in got.items() if want.get(s) != x]
                    wrong.append(f'the logs differ: {apart[:3]}')
                if len(got) < len(want) and 'log.jsonl' not in (root / 'disk.err').read_text(errors='replace'):
                    wrong.append('the log lacks lines, and nobody said so')
                print(f'{steps} steps, {sum(faults.count.values())} faults '
                      f'({", ".join(f"{n} {k}" for k, n in sorted(faults.count.items()))}), {pair.starts} starts, '
                      f'{len(got)} of {len(want)} lines in the log')
            settled = pair.seen[len(pair.seen) // 10:]
            quarters = [settled[len(settled) * i // 4:len(settled) * (i + 1) // 4] for i in range(4)]
            # Medians: a look may fall into a save, which has a file more open.
            descriptors, own = [[statistics.median(x[i] for x in quarter) for quarter in quarters] for i in (0, 1)]
            print(f'left alone: {descriptors} descriptors, {own} KiB of its own in the quarters, by medians of '
                  f'{len(settled)} looks')
            # A heap's edge wanders, up and down; what leaks at each step rises from each quarter to the next.
            if descriptors[3] > descriptors[0] or (DEEP and own == sorted(set(own)) and own[3] > own[0] + SLACK):
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
