# The backward pass of attention, on the four tokens of compare.html: ./run compare --check FILE judges it.
# A matrix is a list of rows. P is 0 where a query does not attend to a key.


def product(a, b):
    return [[sum(x * y for x, y in zip(row, column)) for column in zip(*b)] for row in a]


def transposed(a):
    return [list(column) for column in zip(*a)]


def times(c, a):
    return [[c * x for x in row] for row in a]


def backward(Q, K, V, P, O, dO, c):
    dV = product(transposed(P), dO)
    dP = product(dO, transposed(V))
    Delta = [sum(x * y for x, y in zip(d, o)) for d, o in zip(dO, O)]
    dS = [[p * (dp - delta) for p, dp in zip(*rows)] for *rows, delta in zip(P, dP, Delta)]
    dQ = times(c, product(dS, K))
    dK = times(c, product(transposed(dS), Q))
    return Delta, dS, dQ, dK, dV
