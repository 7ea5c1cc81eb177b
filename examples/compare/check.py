# exercise N DIR: writes exercise_N.py there: of the text of exercise.py, which is the last argument, one step without
# its last line. answer N: prints that line. check FILE: judges such a file by two cases, and names each check that
# fails, with its first wrong number and the mistake that gives it, where that is a known one. The file runs in a
# process of its own: the verdict is not its to give, and what it prints is shown line by line behind a bar.
import copy
import json
import math
import os
import random
import runpy
import stat
import sys
import traceback

Q, K = [[1, 1], [1, 2], [0, 1], [1, 1]], [[1, 0], [-1, 1], [2, 0], [1, -1]]
V, dO = [[4, 0], [0, 4], [2, 2], [8, -8]], [[1, 0], [2, 1], [-2, 2], [1, 2]]
c, step = math.log(2), 1e-5
NAMES = "Delta", "dS", "dQ", "dK", "dV", "meet"


def shown(text, most=300):
    """As a terminal may have it: characters that are seen, and not too many."""
    cut = text if len(text) <= most else f"{text[:most]}.. of {len(text)} characters"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def fail(status, why):
    sys.stdout.flush()
    print(f"compare_gradients: error: --{what} ({shown(value, 100)}): {why}", file=sys.stderr)
    sys.exit(status)


what, value, directory, text = sys.argv[1:]
if what != "check":
    name = NAMES[int(value) - 1]
    opening, *blocks = text.rstrip("\n").split("\n\n\n")
    block = next(block for block in blocks if block.startswith(f"def {name}("))
    given, line = block.rsplit("\n", 1)
    if what == "answer":
        print(line.strip())
        sys.exit()
    nothing = {"Delta": "[0] * 4", "dS": "[[0] * 4] * 4", "meet": "m, l, a"}.get(name, "[[0, 0]] * 4")
    tools = [block for block in blocks if not any(block.startswith(f"def {other}(") for other in NAMES)]
    path = os.path.join(directory, f"exercise_{value}.py")
    try:
        os.makedirs(directory, exist_ok=True)
        with open(path, "x") as file:
            file.write("\n\n\n".join([opening, *tools, f"{given}\n    return {nothing}  # left out: write it"]) + "\n")
    except FileExistsError:
        fail(2, f"{shown(path)} is there; remove it, or name another --out")
    except OSError as error:
        fail(3, f"{shown(path)}: {error.strerror}; name a directory you may write to with --out")
    print(f"wrote {shown(path)}: write the last line of {name}, then ./run compare --check {shown(path)}")
    sys.exit()


def scores(Q, K):
    return [[c * sum(x * y for x, y in zip(q, k)) if u <= t else -math.inf for u, k in enumerate(K)]
            for t, q in enumerate(Q)]


def attention(S, V):
    P = [[math.exp(s) / sum(map(math.exp, row)) for s in row] for row in S]
    return P, [[sum(p * v for p, v in zip(row, column)) for column in zip(*V)] for row in P]


def slopes(x, loss):
    """The finite difference of the loss by each number of x; of a masked score 0."""
    def at(i, j, by):
        return loss([[v + by * ((a, b) == (i, j)) for b, v in enumerate(row)] for a, row in enumerate(x)])
    return [[(at(i, j, step) - at(i, j, -step)) / (2 * step) for j in range(len(row))] for i, row in enumerate(x)]


def product(a, b, factor=1):
    return [[factor * sum(x * y for x, y in zip(row, column)) for column in zip(*b)] for row in a]


def turned(a):
    return [list(column) for column in zip(*a)]


def met(S, V, rescales=True, divides=False):
    """A row's m, l and a after each tile of two keys; of two mistakes."""
    m, l, a, rows = -math.inf, 0, [0, 0], []
    for k in 0, 2:
        top = max(m, *S[k:k + 2])
        w, shrink = [math.exp(s - top) for s in S[k:k + 2]], math.exp(m - top) if rescales else 1
        l, a, m = l * shrink + sum(w), [shrink * x + y for x, y in zip(a, product([w], V[k:k + 2])[0])], top
        rows.append([m, l, *(x / l if divides else x for x in a)])
    return rows


class Case:
    """Numbers to judge by: what each step is given, what it should give, and what known mistakes give."""
    def __init__(self, Q, K, V, dO):
        def loss_of(S, V):
            return sum(x * y for d, o in zip(dO, attention(S, V)[1]) for x, y in zip(d, o))
        S = scores(Q, K)
        P, O = attention(S, V)
        dP, Delta = product(dO, turned(V)), [sum(x * y for x, y in zip(*rows)) for rows in zip(dO, O)]
        dS = [[p * (dp - delta) for p, dp in zip(*rows)] for *rows, delta in zip(P, dP, Delta)]
        self.S, self.V = S[3], V
        self.given = {"Delta": (dO, O), "dS": (P, dP, Delta), "dQ": (dS, K, c), "dK": (dS, Q, c), "dV": (P, dO)}
        self.right = {"Delta": [[sum(p * d for p, d in zip(*rows)) for rows in zip(P, dP)]],
                      "dS": slopes(S, lambda x: loss_of(x, V)), "dQ": slopes(Q, lambda x: loss_of(scores(x, K), V)),
                      "dK": slopes(K, lambda x: loss_of(scores(Q, x), V)), "dV": slopes(V, lambda x: loss_of(S, x)),
                      "meet": met(S[3], V)}
        left_out, twice = "c is left out", "c is there twice"
        self.mistakes = {
            "dS": {"Delta is not subtracted": [[p * d for p, d in zip(*rows)] for rows in zip(P, dP)],
                   "P is not multiplied": [[d - delta for d in row] for row, delta in zip(dP, Delta)]},
            "dQ": {left_out: product(dS, K), twice: product(dS, K, c * c),
                   "dS is transposed": product(turned(dS), K, c)},
            "dK": {left_out: product(turned(dS), Q), twice: product(turned(dS), Q, c * c),
                   "dS is not transposed": product(dS, Q, c)},
            "dV": {"P is not transposed": product(P, dO)},
            "meet": {"l and a are not rescaled": met(S[3], V, rescales=False),
                     "a is divided too early": met(S[3], V, divides=True)}}

    def run(self, name, step):
        """What step, a function of the file, gives."""
        if name != "meet":
            x = step(*copy.deepcopy(self.given[name]))
            return [x] if name == "Delta" else x
        m, l, a, rows = -math.inf, 0, [0, 0], []
        for k in 0, 2:
            m, l, a = step(m, l, list(a), self.S[k:k + 2], copy.deepcopy(self.V[k:k + 2]))
            rows.append([m, l, *a])
        return rows


def drawn():
    """Another case; the last row's largest score comes in its second tile."""
    while True:
        Q, K, V, dO = ([[random.uniform(-2, 2) for _ in range(2)] for _ in range(4)] for _ in range(4))
        if max(scores(Q, K)[3][2:]) > 0.1 + max(scores(Q, K)[3][:2]):
            return Case(Q, K, V, dO)


def close(x, y):
    return [len(row) for row in x] == [len(row) for row in y] and all(
        abs(v - w) < 1e-6 for rows in zip(x, y) for v, w in zip(*rows))


def check(what, name, given, wanted, mistakes=None):
    """Judges the matrices of all cases."""
    global failed
    wrong, hint = "", ""
    for at, (x, right) in enumerate(zip(given, wanted)):
        try:
            if [len(row) for row in x] != [len(row) for row in right]:
                raise ValueError
            pairs = [(i, j, float(v), w) for i, rows in enumerate(zip(x, right)) for j, (v, w) in enumerate(zip(*rows))]
            off = [f"{name}{f'[{i}]' * (len(right) > 1)}[{j}] is {v:.6g}, should be {w:.6g}"
                   for i, j, v, w in pairs if not abs(v - w) < 1e-6]
        except Exception:
            off = [f"{name} is no matrix of {len(right)} x {len(right[0])} numbers"]
        wrong = wrong or (off and off[0] + " with other numbers" * at)
    if wrong and " is no matrix" not in wrong and mistakes:
        known = [m for m in mistakes[0] if all(close(x, of[m]) for x, of in zip(given, mistakes))]
        hint = f"; it looks as if {known[0]}" if known else ""
    failed += bool(wrong)
    print(f"{'WRONG' if wrong else 'ok   '} {what}" + (f": {wrong}{hint}" if wrong else ""))


def plain(x):
    """Numbers and lists of other libraries as those that json knows."""
    try:
        return float(x)
    except TypeError:
        return list(x)


def result_of(path):
    """The step's name and what it gives in each case, as text of json; or why it gave nothing."""
    try:
        names = runpy.run_path(path)
        name = next((name for name in NAMES if callable(names.get(name))), None)
        if name is None:
            raise NameError("none of " + ", ".join(NAMES) + " is a function of it")
        return json.dumps([name, [case.run(name, names[name]) for case in cases]], default=plain)
    except BaseException as error:
        here = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        return json.dumps(f"{f'line {here[-1]}: ' if here else ''}{type(error).__name__[:100]}: {str(error)[:1000]}")


def run(path):
    """result_of(path), found by another process; nothing where that ends before."""
    (said, saying), (got, giving) = os.pipe(), os.pipe()
    os.set_blocking(giving, False), os.set_blocking(got, False)
    leave = os._exit
    if os.fork() == 0:
        try:
            os.dup2(saying, 1), os.dup2(saying, 2)
            text = result_of(path).encode()
            sys.stdout.flush(), os.write(giving, text)
        finally:
            leave(0)
    os.close(saying), os.close(giving)
    left = 10000
    with open(said, errors="replace") as lines:
        while line := lines.readline(1000):
            if 0 <= left < len(line):
                print("| ..")
            left -= len(line)
            if left >= 0:
                print("|", shown(line.rstrip("\n"), 1000))
    try:
        return json.loads(os.read(got, 1 << 16))
    except (OSError, ValueError, RecursionError):
        return "it ended before its step gave a matrix"


try:
    kind = os.stat(value).st_mode
except (OSError, ValueError) as error:
    fail(3, f"{getattr(error, 'strerror', 'no name of a file')}; name one that --exercise wrote")
if not stat.S_ISREG(kind):
    fail(3, "not a regular file; name one that --exercise wrote")
failed, cases = 0, [Case(Q, K, V, dO), drawn()]
try:
    result = run(value)
except KeyboardInterrupt:
    sys.exit(130)
if not (isinstance(result, list) and len(result) == 2 and result[0] in NAMES and len(result[1]) == len(cases)):
    fail(3, shown(str(result)))
name, found = result
meaning = {"Delta": "Delta is the sum of P dP over each row", "meet": "m, l and a are those of the keys so far"}
if name == "dS":
    try:
        sums = [[[sum(row) for row in x]] for x in found]
    except Exception:
        sums = [[]] * len(cases)
    check("each row of dS sums to 0", "the sum of dS", sums, [[[0] * 4]] * len(cases))
check(meaning.get(name, f"{name} is the finite difference by {name[1:]}"), name, found,
      [case.right[name] for case in cases], [case.mistakes.get(name, {}) for case in cases])
print("not yet" if failed else "all checks passed")
sys.exit(failed > 0)
