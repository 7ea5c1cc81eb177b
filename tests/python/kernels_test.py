"""An installed package as Hugging Face's `kernels` loads it: kernels_test.py FOLDER/hilt. Beside another one or without
it: they share no name and no type."""

import importlib.util
import os
import pathlib
import sys
import tomllib

import kernels
import torch
from kernels._rust import Build

source = pathlib.Path(os.environ["SRC"]) / "examples" / "embed" / "python"
assert [str(b) for b in Build.open(source).general.backends] == ["cpu"]
general = tomllib.loads((source / "build.toml").read_text())["general"]
beside = importlib.util.find_spec("hilt") is not None
if beside:
    import hilt
    import hilt._torch
loaded = kernels.get_local_kernel(pathlib.Path(sys.argv[1]))
assert loaded.__name__.startswith("_hilt_cpu_") and beside == ("hilt" in sys.modules)
about, = [k.metadata for k in kernels.get_loaded_kernels()]
assert [about.name.python_name, about.version, about.license] == [general[n] for n in ("name", "version", "license")]

sdpa = torch.nn.functional.scaled_dot_product_attention
x = [torch.randn(2, 3, 64, 16, requires_grad=True) for _ in range(3)]
want = sdpa(*x, is_causal=True)
want_d = torch.autograd.grad(want.sin().sum(), x)


def attend(q, k, v):
    return loaded.attention(q, k, v, causal=True, layout="bhld")


calls = [attend, torch.compile(attend, backend="aot_eager", fullgraph=True)]
if beside:
    calls.append(lambda q, k, v: hilt.attention(q, k, v, causal=True, layout="bhld"))
for call in calls:
    o = call(*x)
    torch.testing.assert_close(o, want)
    for a, b in zip(torch.autograd.grad(o.sin().sum(), x), want_d):
        torch.testing.assert_close(a, b)
print("kernels", kernels.__version__, "torch", torch.__version__, "beside" if beside else "alone", "equals sdpa")
