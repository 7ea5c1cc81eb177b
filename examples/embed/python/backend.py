"""Builds the wheel (PEP 517): the whole library by Meson, linked into one module. HILT_CUDA=1, or the config setting
cuda=1, adds the CUDA kernels; HILT_PYTHON_BUILD names a build directory to keep; HILT_PYTHON_OPTIONS has more options
of Meson."""

import base64
import contextlib
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]


ENV = {**os.environ, "PATH": os.path.dirname(sys.executable) + os.pathsep + os.getenv("PATH", "")}  # pip's own first


def run(*command):
    subprocess.run([str(c) for c in command], check=True, env=ENV)


def version():
    text = (ROOT / "meson.build").read_text()
    return text.split("version: '", 1)[1].split("'", 1)[0]


def wants_cuda(config_settings):
    settings = {"cuda": os.getenv("HILT_CUDA", ""), **(config_settings or {})}
    for name in settings.keys() - {"cuda"}:
        sys.exit(f"hilt: no config setting '{name}'; there is cuda=1")
    answer = {"": False, "0": False, "false": False, "1": True, "true": True}.get(str(settings["cuda"]).lower())
    if answer is None:
        sys.exit(f"hilt: HILT_CUDA or the config setting cuda ({settings['cuda']}): expected 1 or 0")
    if answer and not shutil.which("nvcc"):
        sys.exit("hilt: CUDA was asked for and there is no nvcc in PATH; install the CUDA toolkit, or leave HILT_CUDA "
                 "out")
    return answer


def tags():
    """Of what runs the module: from CPython 3.12 its stable ABI; an older one, or one without its lock, itself."""
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    own, platform = sys.version_info < (3, 12) or "t" in sys.abiflags, re.sub("[-.]", "_", sysconfig.get_platform())
    return (python, python + sys.abiflags, platform) if own else ("cp312", "abi3", platform)


def built(directory, cuda):
    """The module, by Meson in `directory`. One that was kept is configured anew: what pip had put beside itself,
    nanobind and Meson, is gone, and lies elsewhere."""
    options = ["-Dpython=enabled", "-Dexamples=false", "-Dtests=false", "-Dmpi=disabled", "-Dnccl=disabled"]
    options += ["-Ddebug=false", "-Dpython_program=" + sys.executable, f"-Dcuda={'enabled' if cuda else 'disabled'}"]
    options += ["-Dcpp_link_args=-s"]
    again = ["--reconfigure"] if (directory / "build.ninja").exists() else []
    run("meson", "setup", *again, *options, *shlex.split(os.getenv("HILT_PYTHON_OPTIONS", "")), directory, ROOT)
    name = "_hilt" + (".abi3.so" if tags()[1] == "abi3" else sysconfig.get_config_var("EXT_SUFFIX"))
    ninja, cores = ["ninja", "-C", directory, "examples/embed/python/" + name], len(os.sched_getaffinity(0))
    steps = subprocess.run([*ninja, "-n"], env=ENV, check=True, capture_output=True, text=True).stdout
    said = f"hilt: compiling {steps.count('Compiling')} files with {cores} processors; pip install -v shows each"
    print(said, flush=True)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:  # pip hides the rest
        print("\r" + said, file=terminal)
    run(*ninja, f"-j{cores}")
    return directory / "examples" / "embed" / "python" / name


def metadata():
    return f"Metadata-Version: 2.1\nName: hilt\nVersion: {version()}\nLicense: MIT\nRequires-Python: >=3.10\n".encode()


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Without a build: who resolves dependencies does not wait for a compiler."""
    wants_cuda(config_settings)  # or says so at once
    info = pathlib.Path(metadata_directory) / f"hilt-{version()}.dist-info"
    info.mkdir()
    (info / "METADATA").write_bytes(metadata())
    return info.name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(os.getenv("HILT_PYTHON_BUILD", scratch)).resolve()
        module = built(directory, wants_cuda(config_settings))
        files = {f"hilt/{f.name}": f.read_bytes() for f in [*sorted((HERE / "hilt").glob("*.*")), module]}
    tag = "-".join(tags())
    info = f"hilt-{version()}.dist-info"
    files[f"{info}/METADATA"] = metadata()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: hilt\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    files[f"{info}/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = [f"{info}/RECORD,,\n"]
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(content)}\n")
    files[f"{info}/RECORD"] = "".join(record).encode()
    wheel = f"hilt-{version()}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel
