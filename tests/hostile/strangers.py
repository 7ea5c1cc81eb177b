#!/usr/bin/env python3
"""Files that strangers made, and what they may not do: real files, real processes.

    strangers.py BUILD [NAME ..]

Each test is a class of failures that a hostile user met once. A program ends in the right status, in one line that
names the file or the option and the value, and leaves nothing behind; or it does what was asked. The last line counts.
"""
import concurrent.futures
import json
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

from hostile import Place, mixed

TINY = ('--layers 1 --heads 2 --width 16 --context 16 --batch 2 --eval-rows 2 --sample-every 0 --tokens 8 '
        '--device cpu'.split())
BUILD = pathlib.Path()
GUARD = 300  # seconds, which a program that hangs meets: the slowest took 3


class Wrong(Exception):
    pass


def npy(path, shape, descr='<f4', values=None, seed=0):
    count, draw = 1, random.Random(seed)
    for extent in shape:
        count *= extent
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({''.join(f'{n}, ' for n in shape)}), }}"
    header += ' ' * (-(len(header) + 11) % 64) + '\n'
    values = values or [draw.gauss(0, 1) for _ in range(count)]
    kind = {'<f4': 'f', '<i4': 'i', '<i8': 'q', '<u2': 'H'}[descr]
    path.write_bytes(b'\x93NUMPY\x01\x00' + struct.pack('<H', len(header)) + header.encode()
                     + struct.pack(f'<{count}{kind}', *values))


def gpt2(directory, vocabulary, config, **changed):
    """One block of width 16, of 32 positions."""
    directory.mkdir(exist_ok=True)
    shapes = {'wte.weight': [vocabulary, 16], 'wpe.weight': [32, 16], 'ln_f.weight': [16], 'ln_f.bias': [16]}
    for name, shape in {'ln_1': [16], 'ln_2': [16], 'attn.c_attn': [16, 48], 'attn.c_proj': [16, 16],
                        'mlp.c_fc': [16, 64], 'mlp.c_proj': [64, 16]}.items():
        shapes[f'h.0.{name}.weight'], shapes[f'h.0.{name}.bias'] = shape, shape[-1:]
    shapes = {name: shape for name, shape in {**shapes, **changed}.items() if shape}
    draw, header, data = random.Random(1), {}, b''
    for name, shape in sorted(shapes.items()):
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        numbers = [draw.gauss(0, 0.3) for _ in range(size)]
        header[name] = {'dtype': 'F32', 'shape': shape, 'data_offsets': [len(data), len(data) + 4 * size]}
        data += struct.pack(f'<{size}f', *numbers)
    text = json.dumps(header).encode()
    (directory / 'model.safetensors').write_bytes(struct.pack('<Q', len(text)) + text + data)
    if config is not None:
        (directory / 'config.json').write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())


def sealed(source, target, changes):
    """A checkpoint whose metadata say otherwise, with checksums that agree."""
    content = source.read_bytes()
    size, = struct.unpack('<Q', content[:8])
    header = json.loads(content[8:8 + size])
    said = {**header['__metadata__'], **changes}
    h = 2
    for key in sorted(said):
        if key != 'checksum:':
            h = mixed(mixed(h, key.encode()), said[key].encode())
    header['__metadata__'] = {**said, 'checksum:': f'{h:016x}'}
    text = json.dumps(header, ensure_ascii=False).encode()
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(struct.pack('<Q', len(text)) + text + content[8 + size:])


def byte_names():
    """How GPT-2's files show each byte."""
    seen = [b for b in range(256) if 32 < b < 127 or 160 < b < 173 or b > 173]
    hidden = [b for b in range(256) if b not in seen]
    return {chr(b if b in seen else 256 + hidden.index(b)): b for b in range(256)}


class Here:
    """A directory of its own for each test, with a text and arrays."""

    def __init__(self):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix='hilt-strangers-'))
        draw = random.Random(3)
        self.text = ' '.join(draw.choice('the fox and a cat ran to see red'.split()) for _ in range(2000)) + '\n'
        (self.root / 't.txt').write_text(self.text)
        self.symbols = len(set(self.text))

    def start(self, program, *arguments, before=None, env=None, **more):
        more = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, **more}
        words = [a if isinstance(a, bytes) else str(a) for a in arguments]
        return subprocess.Popen([str(BUILD / 'examples' / program), *words], cwd=self.root, stdin=subprocess.DEVNULL,
                                preexec_fn=before,
                                env={**os.environ, 'HILT_THREADS': '1', **(env or {})}, **more)

    def run(self, *arguments, **more):
        run = self.start(*arguments, **more)
        try:
            out, err = run.communicate(timeout=GUARD)
        except subprocess.TimeoutExpired:
            run.kill()
            raise Wrong(f'{arguments} hangs') from None
        return run.returncode, (out or b'').decode(errors='replace'), err.decode(errors='replace')

    def well(self, *arguments, says='', **more):
        status, out, err = self.run(*arguments, **more)
        if status != 0 or says not in err:
            raise Wrong(f'{arguments} ends in {status}, not saying {says!r}: {err[-500:]}')
        return out, err

    def refused(self, status, says, *arguments, left=None, **more):
        """One error line that holds `says`, and nothing new in this directory but what `left` names."""
        before = set(self.root.rglob('*'))
        got, _, err = self.run(*arguments, **more)
        errors = [line for line in err.splitlines() if ': error: ' in line]
        if got != status or len(errors) != 1 or says not in errors[0]:
            raise Wrong(f'{arguments} ends in {got}, expected {status} and {says!r}: {err[-600:]}')
        new = [str(p.relative_to(self.root)) for p in set(self.root.rglob('*')) - before]
        if sorted(new) != sorted(left or []):
            raise Wrong(f'{arguments} leaves {new}')


def gpt2s_configuration(here):
    """config.json decides heads; what it says otherwise than the tensors, or what is not computed here, is refused."""
    train = ['train', '--text', 't.txt', '--from', 'g', '--context', '16', '--steps', '1', '--tokens', '4',
             '--eval-rows', '2', '--out', 'o']
    right = {'n_head': 2, 'model_type': 'gpt2', 'activation_function': 'gelu_new', 'layer_norm_epsilon': 1e-05,
             'n_layer': 1, 'n_embd': 16, 'n_positions': 32,
             'n_ctx': 32, 'vocab_size': here.symbols, 'n_inner': None, 'scale_attn_weights': True, 'attn_pdrop': 0.1,
             'task_specific_params': {'a': {'b': 1}}}
    gpt2(here.root / 'g', here.symbols, right)
    out, err = here.well(*train)
    if '2 heads' not in out or err:
        raise Wrong(f'the right file: {out} {err}')
    shutil.rmtree(here.root / 'o')
    for content, says in {b'{"n_head": 4': 'not JSON at byte 12', b'': 'not JSON at byte 0',
                          b'[]': 'is of type array, expected an object',
                          b'{"n_head": 4.0}': "'n_head' should be of type whole number, is 4.0",
                          b'{"n_head": "4"}': "'n_head' should be of type whole number, is \"4\"",
                          b'{"n_head": 2.5}': "'n_head' should be", b'{"n_head": -2}': "'n_head' should be",
                          b'{"n_head": 0}': 'n_head is 0; expected a divisor of the width, 16',
                          b'{"n_head": 3}': 'n_head is 3; expected a divisor',
                          b'{"n_head": 18446744073709551615}': 'expected a divisor',
                          '{"n_head": 2}'.encode('utf-16'): 'not JSON at byte 0',
                          b'[' * 100000: 'nested more than 16 deep',
                          b'{"n_head": 2, "n_head": 4}': '"n_head" stands there twice',
                          b'{"n_head": 2, "a": "\xff"}': 'not JSON at byte'}.items():
        (here.root / 'g/config.json').write_bytes(content)
        here.refused(3, '--from (g/config.json): ', *train)
        here.refused(3, says, *train)
    for key, value in {'layer_norm_epsilon': 1, 'activation_function': 'relu', 'scale_attn_by_inverse_layer_idx': True,
                       'scale_attn_weights': False,
            'n_layer': 5,
                       'n_embd': 99, 'n_inner': 32, 'model_type': 'llama', 'vocab_size': 50257, 'n_positions': 1024,
                       'tie_word_embeddings': False, 'quantization_config': 'fp8'}.items():
        gpt2(here.root / 'g', here.symbols, {**right, key: value})
        here.refused(3, f'--from (g/config.json): {key} is {json.dumps(value)}; ', *train)
    gpt2(here.root / 'g', here.symbols, right)
    here.refused(2, '--heads (4): g/config.json has 2; leave it out', *train, '--heads', '4')
    gpt2(here.root / 'g', here.symbols, {'model_type': 'gpt2'})
    here.well(*train, says='no config.json there has n_head; --heads 1 is taken')
    (here.root / 'g/config.json').unlink()
    os.mkfifo(here.root / 'g/config.json')
    here.refused(3, '--from (g/config.json): is not a regular file', *train)


def gpt2s_weights(here):
    """Looked at before anything is written; what is no number is the file's, not the learning rate's."""
    small_tokenizer(here.root / 'k')
    train = ['train', '--text', 't.txt', '--from', 'g', '--tokenizer', 'k', '--context', '16', '--steps', '1',
             '--out', 'o/deep']
    for changed, says in [({}, 'its tokens are'), ({'h.0.ln_1.bias': None}, 'h.0.ln_1.bias'),
                          ({'h.0.mlp.c_fc.bias': [63]}, 'h.0.mlp.c_fc.bias'),
                          ({'strange': [1]}, 'strange'),
                          ({'lm_head.weight': [here.symbols, 16]}, 'its head is not its embedding'),
                          ({'h.0.mlp.c_fc.weight': [16, 32], 'h.0.mlp.c_fc.bias': [32],
                            'h.0.mlp.c_proj.weight': [32, 16]}, 'its hidden width is 32')]:
        gpt2(here.root / 'g', here.symbols, {'n_head': 2}, **changed)
        here.refused(3, says, *train)
        (here.root / 'made').mkdir(exist_ok=True)
        here.refused(3, says, *train[:-1], 'made')
    gpt2(here.root / 'g', here.symbols, {'n_head': 2})
    file = here.root / 'g/model.safetensors'
    content = bytearray(file.read_bytes())
    content[-4:] = struct.pack('<f', float('nan'))
    file.write_bytes(content)
    here.refused(7, 'g/model.safetensors: tensor wte.weight holds nan at [', 'train', '--text', 't.txt', '--from',
                 'g', '--context', '16', '--steps',
            '1', '--out', 'o')


def small_vocabulary():
    return {**byte_names(), 'th': 256, 'the': 257, 'fo': 258, 'fox': 259}


def small_tokenizer(directory):
    directory.mkdir()
    (directory / 'vocab.json').write_text(json.dumps(small_vocabulary()))
    (directory / 'merges.txt').write_text('t h\nth e\nf o\nfo x\n')


def tokenizers(here):
    """vocab.json, merges.txt and tokenizer.json: what is read otherwise elsewhere is refused, in words of ours."""
    vocabulary = small_vocabulary()
    train = ['train', *TINY, '--text', 't.txt', '--steps', '1', '--tokenizer', 'k', '--out', 'o']

    def written(files):
        shutil.rmtree(here.root / 'k', ignore_errors=True)
        (here.root / 'k').mkdir()
        for name, content in files.items():
            (here.root / 'k' / name).write_bytes(content if isinstance(content, bytes)
                                                 else json.dumps(content).encode())

    def whole(model=None, **more):
        return {'tokenizer.json': {'model': {'type': 'BPE', 'vocab': vocabulary, 'merges': ['t h', ['th', 'e']],
                                             **(model or {})}, **more}}

    special = {'id': 260, 'content': '<|end|>', 'special': True}
    for files in [whole(), whole({'dropout': None}), whole({'dropout': 0.0}), whole(added_tokens=[special]),
                  {'vocab.json': vocabulary,
            'merges.txt': b'#version: 0.2\nt h\nth e\n'}]:
        written(files)
        here.well(*train)
        shutil.rmtree(here.root / 'o')
    for files, says in [
            ({'vocab.json': vocabulary, 'merges.txt': b't h\n\xff \xfe\n'},
             '--tokenizer (k/merges.txt): invalid UTF-8 at byte 4'),
            ({'vocab.json': b'{"a": ', 'merges.txt': b''}, '--tokenizer (k/vocab.json): not JSON at byte 6'),
            ({'vocab.json': b'{"\xff": 1}', 'merges.txt': b''}, '--tokenizer (k/vocab.json): not JSON at byte 2'),
            ({'vocab.json': b'{"a": 1e999}', 'merges.txt': b''}, 'a number in it is out of range'),
            ({'vocab.json': [1], 'merges.txt': b''}, "--tokenizer (k): 'vocab' should be of type object, is [1]"),
            ({'vocab.json': vocabulary}, '--tokenizer (k/merges.txt): cannot open: No such file or directory'),
            ({'tokenizer.json': {}}, "'model' should be of type object, is missing"),
            ({'tokenizer.json': {'model': None}},
                    "'model' should be of type object, is null"),
            ({'tokenizer.json': []}, "'model' should be of type object, is missing"),
            (whole({'merges': None}), "'merges' should be of type array, is null"),
            (whole({'merges': [['t', 'h', 'e']]}), 'merge ["t","h","e"] is not GPT-2\'s'),
            (whole({'merges': ['t h e']}), "merge 't h e': its parts"),
            (whole({'merges': [[1, 2]]}), 'a value in it is of another type'),
            (whole({'vocab': {**vocabulary, 'th': 257}}), 'both have number 257'),
            (whole({'vocab': {**vocabulary, 'th': '256'}}), 'token th has number "256", at most'),
            (whole({'dropout': 'x'}), 'dropout "x" is not GPT-2\'s'),
            (whole({'dropout': 0.1}), 'dropout 0.1 is not'),
            (whole(added_tokens=[{**special, 'special': False}]), 'added token that is not special'),
            (whole(added_tokens=[{'id': 260, 'content': 'x'}]), 'a value in it is of another type')]:
        written(files)
        here.refused(3, says, *train)
    for name, others in {'vocab.json': {'merges.txt': b''}, 'merges.txt': {'vocab.json': vocabulary},
                         'tokenizer.json': {}}.items():
        written(others)
        os.mkfifo(here.root / 'k' / name)
        here.refused(3, f'--tokenizer (k/{name}): is not a regular file', *train)


def names_that_are_no_text(here):
    """A pattern or an order goes into checkpoints and reports; one that cannot is refused before step 1."""
    npy(here.root / 'bl.npy', (2, 2), '<i4', [0, 0, 1, 1])
    name = os.fsdecode(b'b\xff.npy')
    shutil.copy(here.root / 'bl.npy', here.root / name)
    npy(here.root / 'q.npy', (1, 16, 2, 8))
    for program, *arguments in [('train', *TINY, '--steps', '400'),
                                ('train', *TINY, '--layers', '2', '--steps', '400', '--pattern-odd',
            b'blocks:4@b\xff.npy'),
                                ('compare_gradients', '--length', '16', '--repeat', '2'), ('curves', '--grid', '4x4'),
                                ('attend', '--q', 'q.npy', '--k', 'q.npy', '--v', 'q.npy')]:
        option = '--pattern-odd' if '--pattern-odd' in arguments else '--pattern'
        more = [] if option in arguments else [option, b'blocks:4@b\xff.npy']
        here.refused(2, option + r' (blocks:4@b\xff.npy): not UTF-8 at byte 10; ', program, *arguments, *more, '--out',
                     'o')
    here.refused(2, 'not UTF-8 at byte ', 'train', *TINY, '--order', b'points:p\xff.npy', '--out', 'o')


def threads_that_do_not_start(here):
    """At once, by how many there can be; not after the deadline, and not as a bug of ours."""
    for most in (64 << 20, 100 << 20, 200 << 20):
        def limited(most=most):
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        run = here.start('ring', '--ranks', '64', '--length', '64', '--repeat', '1', before=limited,
                         env={'HILT_DEADLINE': '1000'})
        try:
            err = run.communicate(timeout=GUARD)[1].decode()
        except subprocess.TimeoutExpired:
            run.kill()
            raise Wrong(f'ring waits for threads that were never started, {most} bytes') from None
        if run.returncode != 4 or err.count('\n') != 1:
            raise Wrong(f'{most} bytes: {run.returncode} {err}')
        if most == 64 << 20 and ' of 64: no thread can be started for it' not in err:
            raise Wrong(f'the number is not said: {err}')


def memory_that_ends_in_a_rank(here):
    """Wherever it ends, in the words for it too: no rank takes the process with it, none waits."""
    for one_of in [3, 20, 500] * 20:
        run = here.start('ring', '--ranks', '8', '--length', '64', '--repeat', '1',
                         env={'LD_PRELOAD': str(BUILD / 'tests/hostile/libno_memory.so'),
                              'HILT_NO_MEMORY_ONE_OF': str(one_of), 'HILT_DEADLINE': '1000'})
        err = run.communicate(timeout=GUARD)[1].decode()
        if run.returncode not in (0, 4) or err.count('\n') != (run.returncode != 0):
            raise Wrong(f'one of {one_of}: {run.returncode} {err}')


def two_into_one_directory(here):
    """The files of one run stand beside each other, whoever comes meanwhile; what a killed one left goes."""
    for name, seed in {'a': 1, 'b': 2}.items():
        npy(here.root / f'{name}.npy', (1, 64, 2, 8), seed=seed)

    def attend(name, out):
        return ['attend', *(w for option in ('--q', '--k', '--v', '--d-o') for w in (option, f'{name}.npy')), '--out',
                out]
    here.well(*attend('a', 'alone'))
    faults = {'LD_PRELOAD': str(BUILD / 'tests/hostile/libfaults.so'), 'HILT_FAULT_UNDER': str(here.root / 'o'),
              'HILT_FAULT_HOW': 'stop',
            'HILT_FAULT_AT': '4'}
    for deed in ('goes on', 'is killed'):
        first = here.start(*attend('a', 'o'), env=faults)
        if not Place.stands(first):
            raise Wrong('it does not stop in the middle')
        here.refused(3, '--out (o): another program writes to this directory; wait for it or name another directory',
                     *attend('b', 'o'))
        if deed == 'goes on':
            Place.let_through(first)
            if any((here.root / 'o' / p.name).read_bytes() != p.read_bytes() for p in (here.root / 'alone').iterdir()):
                raise Wrong('files of two runs')
        else:
            first.kill()
            first.communicate()
            if not list((here.root / 'o').glob('.*')):
                raise Wrong('nothing was left, so nothing is shown')
            here.well(*attend('b', 'o'))
            if list((here.root / 'o').glob('.*')):
                raise Wrong(f'left by a killed program: {list((here.root / "o").glob(".*"))}')


def what_a_killed_training_leaves(here):
    """Wherever it is killed, the end has the files of a run that was not; also with byte pairs."""
    small_tokenizer(here.root / 'k')
    options = ['train', *TINY, '--text', 't.txt', '--tokenizer', 'k', '--steps', '4', '--save-every', '2',
               '--sample-every', '2', '--out']
    at_end = ['--sample-every', '2', '--tokens', '8', '--eval-rows', '2']
    here.well(*options[:-1], '--out', 'whole')
    wanted = sorted(p.name for p in (here.root / 'whole').iterdir())
    faults = {'LD_PRELOAD': str(BUILD / 'tests/hostile/libfaults.so'), 'HILT_FAULT_HOW': 'kill',
              'HILT_FAULT_UNDER': str(here.root)}
    for at in range(1, 200):
        out = here.root / f'o{at}'
        status = here.run(*options, out.name, env={**faults, 'HILT_FAULT_AT': str(at)})[0]
        if status != 0:
            saved = list(out.glob('ckpt-*.safetensors')) if out.is_dir() else []
            if any(p.name == 'ckpt-000004.safetensors' for p in saved):
                continue
            here.well(*(['train', '--resume', '--text', 't.txt', '--out', out.name, *at_end] if saved
                        else [*options, out.name]))
        found = sorted(p.name for p in out.iterdir())
        if found != wanted:
            raise Wrong(f'killed before call {at}, it ends with {found}, not {wanted}')
        shutil.rmtree(out)
        if status == 0:
            return
    raise Wrong('more calls than are tried')


def seeds_of_samples(here):
    """Any seed in its range draws rows."""
    life = ['train', '--task', 'life', '--grid', '4x4', '--layers', '1', '--heads', '2', '--width', '16', '--steps',
            '1', '--eval-rows', '2', '--device',
            'cpu']
    here.well(*life, '--out', 'life')
    for seed in (0, 576460752303423487, 576460752303423488, 9223372036854775806, 9223372036854775807):
        here.well('sample', '--out', 'life', '--seed', seed)


def forged_settings(here):
    """What a checkpoint says wrongly is the file's fault, for sample and for --resume: nobody gave an option."""
    here.well('train', *TINY, '--steps', '2', '--out', 'o')
    source = here.root / 'o/ckpt-000002.safetensors'
    for key, value in [('order', '-1'), ('order', 'row:3x3'), ('order', 'a\0b'), ('pattern', 'x'),
                       ('pattern', 'segment:0'), ('relative', '4'), ('bias',
            '8'), ('alibi', 'z'),
                       ('pattern-odd', 'x'), ('pattern-odd', 'segment:4'), ('width', '17'), ('heads', '3'),
                       ('grid', '9'), ('warmup', '7'),
                       ('dilation-mode', 'z'),
                       ('positions', 'z'), ('dtype', 'f8'), ('causal', 'x'), ('order', '\x7f')]:
        target = here.root / 'bad/ckpt-000001.safetensors'
        sealed(source, target, {f'config.{key}': value, 'step': '1', 'updates': '1'})
        unread = (key, value) in [('grid', '9'), ('warmup', '7'), ('pattern-odd', 'segment:4')]  # by sample
        for command in (['train', '--resume'], *([] if unread else [['sample']])):
            here.refused(3, 'bad/ckpt-000001.safetensors', *command, '--out', 'bad', '--tokens', '4')
            _, _, err = here.run(*command, '--out', 'bad', '--tokens', '4')
            if err.count('(') != err.count(')'):
                raise Wrong(f'a message is cut short: {err}')
        shutil.rmtree(here.root / 'bad')
    for key in ('rows', 'updates', 'step'):
        sealed(source, here.root / 'bad/ckpt-000001.safetensors', {'step': '1', key: '9223372036854775807'})
        here.refused(3, f"metadata '{key}' is 9223372036854775807, more than anything is counted to", 'train',
                     '--resume', '--out', 'bad', '--tokens', '4')
        shutil.rmtree(here.root / 'bad')


def options_that_cannot_matter(here):
    """What the task has no use for is refused, as --text beside it is; a configuration that was printed comes back."""
    for task in ('life', 'ising'):
        for words in (['--vocabulary', 'bytes'], ['--prompt', 'x'], ['--top-k', '5'], ['--top-p', '0.5'],
                      ['--temperature', '2'], ['--stop', 'q'], ['--tokens', '9']):
            here.refused(2, f'{words[0]} ({words[1]}): ', 'train', '--task', task, *words, '--steps', '1', '--out', 'o')
    for words in (['--grid', '8x8'], ['--vocabulary', 'bytes']):
        here.refused(2, f'{words[0]} ({words[1]}): ', 'train', *words, '--steps', '1', '--out', 'o')
    for task in ('stories', 'life', 'ising'):
        printed, _ = here.well('train', '--task', task, '--print-config')
        (here.root / 'all.ini').write_text(printed)
        again, _ = here.well('train', '--config', 'all.ini', '--print-config')
        if again != printed:
            raise Wrong(f'the configuration of {task} comes back otherwise')


def messages(here):
    """Each names the option and what to do."""
    npy(here.root / 'q.npy', (1, 64, 2, 8))
    attend = ['attend', '--q', 'q.npy', '--k', 'q.npy', '--v', 'q.npy', '--out', 'o']
    (here.root / 'own').mkdir()
    npy(here.root / 'own/o.npy', (1, 64, 2, 8))
    here.refused(2, '--out (own): own/o.npy is an input; name another directory', 'attend', '--q', 'own/o.npy', '--k',
                 'q.npy', '--v', 'q.npy', '--out', 'own')
    for option in ('--q', '--k', '--v', '--d-o', '--sink', '--bias', '--relative', '--alibi'):
        here.refused(3, f'{option} (nosuch): cannot open: No such file or directory', *attend, option, 'nosuch')
    here.refused(2, '--ranks (2): --mode taped is for one rank', *attend, '--ranks', '2', '--mode', 'taped', '--d-o',
                 'q.npy')
    here.refused(2, '--ranks (2): --queries 0:64 is for one rank', *attend, '--ranks', '2', '--queries', '0:64')
    here.refused(2, '--pattern (segment:4,dilation=2,offset=2): offset 2 must be below', 'curves', '--pattern',
                 'segment:4,dilation=2,offset=2', '--out', 'o')
    here.refused(2, '--pattern (neighborhood:2): neighborhood:2: the number of keys must be odd', 'curves', '--pattern',
                 'neighborhood:2', '--out', 'o')
    here.refused(3, '--text (/proc/cpuinfo): has no size, as files in /proc', 'train', '--text', '/proc/cpuinfo',
                 '--out', 'o')
    for name, value in {'HILT_GPU_POOL_BYTES': 'abc', 'HILT_ROUTE': 'abc', 'HILT_TF32': '2'}.items():
        here.refused(2, f'{name} (abc): '.replace('abc', value), 'curves', '--grid', '8x8', '--out', 'o',
                     env={name: value})
    (here.root / 'n.ini').write_bytes(b'\xef\xbb\xbflayers = 1\n')
    if 'layers = 1\n' not in here.well('train', '--config', 'n.ini', '--print-config')[0]:
        raise Wrong('a byte order mark hides the first key')
    here.refused(3, 'log.jsonl: File too large', 'train', *TINY, '--steps', '1', '--out', 'o',
                 before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)), stdout=subprocess.DEVNULL)
    for command in (['ring', '--ranks', '2'], ['train', *TINY, '--out', 'o']):
        here.refused(2, '--relative (3x3): table [', *command, '--relative', '3x3')
        here.refused(2, '--bias (1x3x1xL): axis 1 of', *command, '--bias', '1x3x1xL')
    here.refused(7, '--weight-decay', 'train', *TINY, '--weight-decay', '1e6', '--steps', '100', '--eval-every', '1000',
                 '--out', 'o', left=['o',
            'o/log.jsonl'])


def plans_that_are_too_large(here):
    """A dry run says the bytes without making what does not fit."""
    for words in (['--layers', '1024', '--heads', '1024', '--width', '65536', '--context', '1048576', '--batch',
                   '65536'], ['--task', 'life', '--grid',
            '1024x1024']):
        run = here.start('train', *words, '--dry-run', before=lambda: resource.setrlimit(resource.RLIMIT_CPU, (3, 3)))
        out = run.communicate(timeout=GUARD)[0].decode()
        if run.returncode != 0 or 'planned at least' not in out:
            raise Wrong(f'{words}: {run.returncode} {out}')


TESTS = [gpt2s_configuration, gpt2s_weights, tokenizers, names_that_are_no_text, threads_that_do_not_start,
         memory_that_ends_in_a_rank, two_into_one_directory, what_a_killed_training_leaves, seeds_of_samples,
         forged_settings, options_that_cannot_matter, messages, plans_that_are_too_large]


def main():
    global BUILD
    BUILD = pathlib.Path(sys.argv[1]).resolve()
    tests = [t for t in TESTS if not sys.argv[2:] or t.__name__ in sys.argv[2:]]

    def verdict(test):
        here = Here()
        try:
            test(here)
        except Wrong as wrong:
            return str(wrong)
        finally:
            shutil.rmtree(here.root, ignore_errors=True)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for test, what in zip(tests, pool.map(verdict, tests)):
            failed += what is not None
            if what:
                print(f'FAILED: {test.__name__}: {what}')
    print(f'{len(tests) - failed} passed, {failed} failed, 0 skipped')
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
