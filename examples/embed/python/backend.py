"""Builds the wheel (PEP 517): the whole library by Meson, linked into one module. HILT_CUDA=1, or the config setting
cuda=1, adds the CUDA kernels; HILT_PYTHON_BUILD names a build directory to keep; HILT_PYTHON_OPTIONS has more options
of Meson."""

import base64
import hashlib
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def run(*command):
    tools = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")  # pip's own come first
    subprocess.run([str(c) for c in command], check=True, env={**os.environ, "PATH": tools})


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


def built(directory, cuda):
    """The module, by Meson in `directory`. One that was kept is configured anew: what pip had put beside itself,
    nanobind and Meson, is gone, and lies elsewhere."""
    options = ["-Dpython=enabled", "-Dexamples=false", "-Dtests=false", "-Dmpi=disabled", "-Dnccl=disabled"]
    options += ["-Ddebug=false", "-Dpython_program=" + sys.executable, f"-Dcuda={'enabled' if cuda else 'disabled'}"]
    again = ["--reconfigure"] if (directory / "build.ninja").exists() else []
    run("meson", "setup", *again, *options, *shlex.split(os.getenv("HILT_PYTHON_OPTIONS", "")), directory, ROOT)
    name = "_hilt" + sysconfig.get_config_var("EXT_SUFFIX")
    run("ninja", "-C", directory, f"-j{len(os.sched_getaffinity(0))}", "examples/embed/python/" + name)
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
    python, platform = f"cp{sys.version_info[0]}{sys.version_info[1]}", sysconfig.get_platform()
    tag = f"{python}-{python}-{platform.replace('-', '_').replace('.', '_')}"
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
