# A step of attention, on the four tokens of compare.html: ./run compare --check FILE judges it, by these and by other
# numbers. A matrix is a list of rows. P is 0 where a query does not attend to a key.
import math


def product(a, b):
    return [[sum(x * y for x, y in zip(row, column)) for column in zip(*b)] for row in a]


def transposed(a):
    return [list(column) for column in zip(*a)]


def times(c, a):
    return [[c * x for x in row] for row in a]


def Delta(dO, O):  # a list: the sum of P dP over each row, without P
    return [sum(x * y for x, y in zip(d, o)) for d, o in zip(dO, O)]


def dS(P, dP, Delta):  # through the softmax
    return [[p * (dp - delta) for p, dp in zip(*rows)] for *rows, delta in zip(P, dP, Delta)]


def dQ(dS, K, c):  # to the queries
    return times(c, product(dS, K))


def dK(dS, Q, c):  # to the keys
    return times(c, product(transposed(dS), Q))


def dV(P, dO):  # to the values
    return product(transposed(P), dO)


def meet(m, l, a, S, V):  # the running softmax: m, l and a of a row once it met a tile, scores S and rows V of values
    top, w = max(m, *S), [math.exp(s - max(m, *S)) for s in S]
    return top, math.exp(m - top) * l + sum(w), [math.exp(m - top) * x + y for x, y in zip(a, product([w], V)[0])]
