# exercise N DIR: writes exercise_N.py there, the text of exercise.py, which is the last argument, with a line left out.
# answer N: prints that line. check FILE: judges such a file, and names each check that fails, with its first wrong
# number. The file runs in a process of its own: the verdict is not its to give, and what it prints is shown line by
# line behind a bar.
import copy
import json
import math
import os
import runpy
import stat
import sys
import traceback

Q, K = [[1, 1], [1, 2], [0, 1], [1, 1]], [[1, 0], [-1, 1], [2, 0], [1, -1]]
V, dO = [[4, 0], [0, 4], [2, 2], [8, -8]], [[1, 0], [2, 1], [-2, 2], [1, 2]]
c, step = math.log(2), 1e-5


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
    name, zeros = [("Delta", "[0] * len(Q)"), ("dS", "[[0] * len(K) for q in Q]"), ("dQ", "[[0, 0] for q in Q]"),
                   ("dK", "[[0, 0] for k in K]"), ("dV", "[[0, 0] for v in V]")][int(value) - 1]
    line = next(line for line in text.splitlines() if line.startswith(f"    {name} = "))
    if what == "answer":
        print(line.strip())
        sys.exit()
    path = os.path.join(directory, f"exercise_{value}.py")
    try:
        os.makedirs(directory, exist_ok=True)
        with open(path, "x") as file:
            file.write(text.replace(line, f"    {name} = {zeros}  # left out: write it"))
    except FileExistsError:
        fail(2, f"{shown(path)} is there; remove it, or name another --out")
    except OSError as error:
        fail(3, f"{shown(path)}: {error.strerror}; name a directory you may write to with --out")
    print(f"wrote {shown(path)}: write its line of {name}, then ./run compare --check {shown(path)}")
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


def loss_of(S, V):
    return sum(x * y for d, o in zip(dO, attention(S, V)[1]) for x, y in zip(d, o))


S = scores(Q, K)
P, O = attention(S, V)
dP = [[sum(x * y for x, y in zip(d, v)) for v in V] for d in dO]
failed = 0


def check(what, name, given, wanted):
    global failed
    try:
        given = [list(row) for row in given]
        if [len(row) for row in given] != [len(row) for row in wanted]:
            raise ValueError
        pairs = [(i, j, given[i][j], w) for i, row in enumerate(wanted) for j, w in enumerate(row)]
        wrong = [f"{name}{f'[{i}]' * (len(wanted) > 1)}[{j}] is {x:.6g}, should be {w:.6g}"
                 for i, j, x, w in pairs if not abs(x - w) < 1e-6]
    except Exception:
        wrong = [f"{name} is no matrix of {len(wanted)} x {len(wanted[0])} numbers"]
    failed += bool(wrong)
    print(f"{'WRONG' if wrong else 'ok   '} {what}" + (f": {wrong[0]}" if wrong else ""))


def plain(x):
    """Numbers and lists of other libraries as those that json knows."""
    try:
        return float(x)
    except TypeError:
        return list(x)


def result_of(path):
    """What backward() of the file gives, as text of json; or why it gave nothing."""
    try:
        Delta, dS, dQ, dK, dV = runpy.run_path(path)["backward"](*copy.deepcopy((Q, K, V, P, O, dO)), c)
        return json.dumps([Delta, dS, dQ, dK, dV], default=plain)
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
        return "it ended before backward() gave its five matrices"


try:
    kind = os.stat(value).st_mode
except (OSError, ValueError) as error:
    fail(3, f"{getattr(error, 'strerror', 'no name of a file')}; name one that --exercise wrote")
if not stat.S_ISREG(kind):
    fail(3, "not a regular file; name one that --exercise wrote")
try:
    result = run(value)
except KeyboardInterrupt:
    sys.exit(130)
if not isinstance(result, list) or len(result) != 5:
    fail(3, shown(str(result)))
Delta, dS, dQ, dK, dV = result
check("Delta is the sum of P dP over each row", "Delta", [Delta],
      [[sum(p * d for p, d in zip(*rows)) for rows in zip(P, dP)]])
try:
    sums = [[sum(row) for row in dS]]
except Exception:
    sums = dS
check("each row of dS sums to 0", "the sum of dS", sums, [[0] * 4])
check("dS is the finite difference by S", "dS", dS, slopes(S, lambda x: loss_of(x, V)))
check("dQ is the finite difference by Q", "dQ", dQ, slopes(Q, lambda x: loss_of(scores(x, K), V)))
check("dK is the finite difference by K", "dK", dK, slopes(K, lambda x: loss_of(scores(Q, x), V)))
check("dV is the finite difference by V", "dV", dV, slopes(V, lambda x: loss_of(S, x)))
print(f"{failed} of 6 checks failed" if failed else "all 6 checks passed")
sys.exit(failed > 0)
