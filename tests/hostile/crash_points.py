#!/usr/bin/env python3
"""Every point at which a training can be stopped, by enumeration.

    crash_points.py BUILD [--checkpoints N] [--subsets N] [--seed S] [--only ERROR-POINT | POINT:KEPT]

A short run of train writes its checkpoints, log and samples with faults.so in front, which lists each call that changes
a file. Then, for every one of those calls:
  error      the call fails (a full disk, a broken one): the run ends in 0 or 3, never otherwise;
  power cut  the process stops before the call. What was synced is there; of the rest none is, all is, each alone is
             lost, each alone is kept, and so for seeded subsets. The directory is made as it would be found.
After each the run is resumed, or begun anew where no checkpoint is there, and must end with the same bytes:
checkpoints, samples, and the losses of every step in the log. Nothing is lost but the steps since the last checkpoint
that was saved. The last line counts: `N passed, N failed, N skipped`.
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

STEPS_EACH = 2


def options(checkpoints):
    steps = STEPS_EACH * checkpoints
    return f'--layers 1 --heads 1 --width 8 --context 16 --batch 1 --steps {steps} --warmup 1 --device cpu'.split()


# what a run is not decided by, and a resumed one is told again
CADENCE = (f'--save-every {STEPS_EACH} --eval-every {STEPS_EACH} --eval-rows 1 '
           f'--sample-every {STEPS_EACH} --tokens 4 --prompt a').split()


class Directory:
    """What a file system holds: names that lead to inodes, and what the inodes hold."""

    def __init__(self):
        self.names, self.data = {}, {}

    def apply(self, op):
        kind, inode = op['kind'], op['inode']
        if kind in ('create', 'mkdir'):
            self.names[op['path']] = inode
            self.data.setdefault(inode, None if kind == 'mkdir' else bytearray())
        elif kind == 'write':
            content = self.data.setdefault(inode, bytearray())
            end = op['at'] + len(op['bytes'])
            content.extend(bytes(max(0, end - len(content))))
            content[op['at']:end] = op['bytes']
        elif kind == 'resize':
            content = self.data.setdefault(inode, bytearray())
            del content[op['at']:]
            content.extend(bytes(op['at'] - len(content)))
        elif kind == 'rename':
            if self.names.get(op['path']) == inode:
                del self.names[op['path']]
            self.names[op['to']] = inode
            self.data.setdefault(inode, bytearray())
        elif kind == 'unlink' and self.names.get(op['path']) == inode:
            del self.names[op['path']]

    def make(self, where):
        directories = sorted(p for p, i in self.names.items() if self.data[i] is None)
        for path in directories:
            if all(str(parent) in self.names or str(parent) == '.' for parent in pathlib.PurePath(path).parents):
                (where / path).mkdir(exist_ok=True)
        for path, inode in self.names.items():
            if self.data[inode] is not None and (where / path).parent.is_dir():
                (where / path).write_bytes(self.data[inode])


def read_trace(path, root):
    """The calls, as operations on inodes; `lasting` is the number of the sync that makes one last, or none."""
    ops, names, fresh, pending = [], {}, 0, []
    for line in path.read_text().splitlines():
        call, first, second, number, data = line.split('\t')
        name = os.path.relpath(first, root)
        op = {'kind': call, 'path': name, 'inode': names.get(name), 'lasting': None}
        if call in ('create', 'mkdir'):
            op['inode'] = names[name] = fresh = fresh + 1
        elif call == 'write':
            op.update(at=int(number), bytes=bytes.fromhex(data))
        elif call == 'truncate':
            op.update(kind='resize', at=0)
        elif call == 'resize':
            op['at'] = int(number)
        elif call == 'rename':
            op['to'] = os.path.relpath(second, root)
            names[op['to']] = names.pop(name)
        elif call == 'unlink':
            names.pop(name, None)
        elif call == 'sync':
            for other in pending:
                of_data = other['kind'] in ('write', 'resize')
                parents = {os.path.dirname(other[key]) or '.' for key in ('path', 'to') if key in other}
                if other['lasting'] is None and (other['inode'] == op['inode'] if of_data else parents <= {name}):
                    other['lasting'] = len(ops)
        pending.append(op)
        ops.append(op)
    return ops


class Judge:
    def __init__(self, arguments, scratch):
        self.build, self.scratch, self.checkpoints = arguments.build.resolve(), scratch, arguments.checkpoints
        self.known, self.digests = {}, {}
        self.slowest, self.guard = 0, 120  # seconds; only a run that hangs meets the guard

    def train(self, root, *more, **environment):
        command = [self.build / 'examples/train', *(options(self.checkpoints) if '--resume' not in more else []),
                   '--out', 'run', *CADENCE, *more]
        env = {**os.environ, **environment, 'HILT_THREADS': '1'}
        began = time.monotonic()
        done = subprocess.run(command, cwd=root, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=self.guard)
        self.slowest = max(self.slowest, time.monotonic() - began)
        self.guard = max(self.guard, 10 * self.slowest)
        return done

    def faulty(self, root, **environment):
        return self.train(root, LD_PRELOAD=str(self.build / 'tests/hostile/libfaults.so'), HILT_FAULT_UNDER=str(root),
                          **environment)

    def fresh(self, prefix):
        return pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=self.scratch))

    def reference(self):
        root, trace = self.fresh('reference'), self.scratch / 'trace'
        done = self.faulty(root, HILT_FAULT_TRACE=str(trace))
        if done.returncode != 0:
            sys.exit(f'the undisturbed run ends in {done.returncode}: {done.stderr}')
        self.wanted = self.outcome(root)
        self.last = max(name for name in self.wanted if name.startswith('ckpt-'))
        self.ops = read_trace(trace, root)
        state, self.bests = Directory(), set()  # each that was the best for a while
        for op in self.ops:
            state.apply(op)
            if op['kind'] == 'rename' and op['to'] == 'run/best.safetensors':
                self.bests.add(hashlib.sha256(state.data[op['inode']]).hexdigest())

    @staticmethod
    def losses(log):
        try:
            return [(line['step'], line['loss']) for line in map(json.loads, log.splitlines()[1:])]
        except (ValueError, KeyError) as error:
            return f'no log: {error}'

    @staticmethod
    def outcome(root):
        """What must come out: whole files by their bytes, the log by its losses."""
        found = {}
        for path in sorted((root / 'run').iterdir()):
            if path.name == 'log.jsonl':
                found[path.name] = Judge.losses(path.read_text(errors='replace'))
            elif path.suffix in ('.safetensors', '.txt'):
                found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[path.name] = 'there'
        return found

    def resumes(self, root, saved, said=''):
        """What is wrong with the end of a run that goes on from here; at least `saved` steps are not lost."""
        steps = ([int(p.name[5:11]) for p in (root / 'run').glob('ckpt-*.safetensors')] if (root / 'run').is_dir()
                 else [])
        if max(steps, default=0) < saved:
            return f'the checkpoint of step {saved} was saved and is gone; there are {steps}'
        if max(steps, default=0) < STEPS_EACH * self.checkpoints:
            done = self.train(root, *(['--resume'] if steps else []))
            if done.returncode != 0:
                return f'going on from {steps} ends in {done.returncode}: {done.stderr.strip()}'
        else:
            said = 'the report is made after the last checkpoint'
        return self.lacks(root, said)

    def error(self, point):
        root = self.fresh('error')
        done = self.faulty(root, HILT_FAULT_AT=str(point + 1), HILT_FAULT_HOW='error')
        if done.returncode not in (0, 3):
            return f'ends in {done.returncode}: {done.stderr.strip()}'
        if (root / 'run' / self.last).is_file():
            return self.lacks(root, done.stderr)
        return self.resumes(root, 0, done.stderr)

    def lacks(self, root, said):
        """The run is over. What is there has the right bytes; what is not, a line on stderr told."""
        found = self.outcome(root)
        for name, wanted in self.wanted.items():
            got = found.get(name)
            right = set(got) <= set(wanted) if isinstance(got, list) else got in (None, wanted)
            # whole, and of an earlier step: to be told as well
            right |= name == 'best.safetensors' and got in self.bests
            if not right or name == self.last and got is None:
                return f'{name} is {got}, not {wanted}'
            if got != wanted and not said:
                return f'{name} is not whole, and nobody said so'
        return None

    def key(self, took_place):
        """Names and contents that these calls leave. What a file holds is worked out once for the calls that made it
        so."""
        names, made = {}, {}
        for i in took_place:
            op = self.ops[i]
            inode = op['inode']
            if op['kind'] in ('create', 'mkdir', 'write', 'resize'):
                made.setdefault(inode, []).append(i)
            if op['kind'] in ('create', 'mkdir'):
                names[op['path']] = inode
            elif op['kind'] in ('rename', 'unlink'):
                if names.get(op['path']) == inode:
                    del names[op['path']]
                if op['kind'] == 'rename':
                    names[op['to']] = inode
        parts = []
        for path in sorted(names):
            calls = ('.tmp' in path, *made.get(names[path], ()))
            if calls not in self.digests:
                file = Directory()
                for i in calls[1:]:
                    file.apply(self.ops[i])
                data = file.data.get(names[path], b'')
                part = data if data is None or not calls[0] else data[:1]  # unfinished, whatever it holds: one state
                self.digests[calls] = (data is None, hashlib.sha256(part or b'').digest())
            parts.append((path, self.digests[calls]))
        return tuple(parts)

    def power_cut(self, point, kept):
        """The state after a power cut before call `point`, of whose pending calls `kept` took place."""
        took_place = [i for i, op in enumerate(self.ops[:point])
                      if (op['lasting'] is not None and op['lasting'] < point) or i in kept]
        saved = max((int(op['to'][9:15]) for op in self.ops[:point]
                     if op['kind'] == 'rename' and op['to'].startswith('run/ckpt-') and op['lasting'] is not None
                     and op['lasting'] < point), default=0)
        key = (self.key(took_place), saved)
        if key not in self.known:
            root, state = self.fresh('cut'), Directory()
            for i in took_place:
                state.apply(self.ops[i])
            state.make(root)
            self.known[key] = self.resumes(root, saved)
            shutil.rmtree(root)
        return self.known[key]

    def pending(self, point):
        return [i for i, op in enumerate(self.ops[:point])
                if op['kind'] not in ('sync', 'close', 'map') and (op['lasting'] is None or op['lasting'] >= point)]


def subsets(judge, count, seed):
    """(point, calls that took place) for every point: none, all, each alone lost or kept; then random ones."""
    points = range(len(judge.ops) + 1)
    for point in points:
        pending = judge.pending(point)
        yield point, frozenset()
        yield point, frozenset(pending)
        for one in pending:
            yield point, frozenset([one])
            yield point, frozenset(pending) - {one}
    draw = random.Random(seed)
    for _ in range(count):
        point = draw.choice(points)
        yield point, frozenset(i for i in judge.pending(point) if draw.random() < 0.5)


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument('build', type=pathlib.Path)
    parse.add_argument('--checkpoints', type=int, default=int(os.environ.get('HILT_CRASH_CHECKPOINTS', 2)))
    parse.add_argument('--subsets', type=int, default=1000)
    parse.add_argument('--seed', type=int, default=1)
    parse.add_argument('--only')
    arguments = parse.parse_args()
    with tempfile.TemporaryDirectory(prefix='hilt-crash-') as scratch:
        judge = Judge(arguments, pathlib.Path(scratch).resolve())
        judge.reference()
        cases = ([('error', n) for n in range(len(judge.ops))]
                 + [('cut', *c) for c in dict.fromkeys(subsets(judge, arguments.subsets, arguments.seed))])
        if arguments.only:
            point, _, kept = arguments.only.partition(':')
            cases = ([('cut', int(point), frozenset(map(int, filter(None, kept.split(',')))))] if ':' in arguments.only
                     else [('error', int(point))])

        def verdict(case):
            what = judge.error(case[1]) if case[0] == 'error' else judge.power_cut(*case[1:])
            return case, what
        failed = 0
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for case, what in pool.map(verdict, cases):
                if not what:
                    continue
                failed += 1
                name = str(case[1]) if case[0] == 'error' else f'{case[1]}:{",".join(map(str, sorted(case[2])))}'
                at = judge.ops[case[1]] if case[1] < len(judge.ops) else {'kind': 'the end', 'path': ''}
                print(f'FAILED: {case[0]} at {at["kind"]} {at["path"]} (--only {name}): {what}')
        cuts = len(cases) - len(judge.ops)
        print(f'the slowest run took {judge.slowest:.1f} s, the guard is {judge.guard:.0f} s')
        print(f'{len(judge.ops)} calls, each failing; {cuts} power cuts, {len(judge.known)} different directories')
        print(f'{len(cases) - failed} passed, {failed} failed, 0 skipped')
        return failed > 0


if __name__ == '__main__':
    sys.exit(main())
