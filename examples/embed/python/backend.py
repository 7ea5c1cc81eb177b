"""Builds the wheel (PEP 517): the whole library by Meson, linked into one module. HILT_PYTHON_BUILD names a build
directory to keep; HILT_PYTHON_OPTIONS has more options of Meson."""

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


def built(directory):
    """The module, by Meson in `directory`."""
    if not (directory / "build.ninja").exists():
        options = ["-Dpython=enabled", "-Dexamples=false", "-Dtests=false", "-Dmpi=disabled", "-Dnccl=disabled"]
        options += ["-Dpython_program=" + sys.executable]
        cuda = "enabled" if shutil.which("nvcc") else "disabled"
        options += [f"-Dcuda={cuda}", *shlex.split(os.getenv("HILT_PYTHON_OPTIONS", ""))]
        run("meson", "setup", directory, ROOT, *options)
    name = "_hilt" + sysconfig.get_config_var("EXT_SUFFIX")
    run("ninja", "-C", directory, f"-j{len(os.sched_getaffinity(0))}", "examples/embed/python/" + name)
    return directory / "examples" / "embed" / "python" / name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with tempfile.TemporaryDirectory() as scratch:
        module = built(pathlib.Path(os.getenv("HILT_PYTHON_BUILD", scratch)).resolve())
        files = {f"hilt/{f.name}": f.read_bytes() for f in [*sorted((HERE / "hilt").glob("*.*")), module]}
    python, platform = f"cp{sys.version_info[0]}{sys.version_info[1]}", sysconfig.get_platform()
    tag = f"{python}-{python}-{platform.replace('-', '_').replace('.', '_')}"
    info = f"hilt-{version()}.dist-info"
    about = f"Metadata-Version: 2.1\nName: hilt\nVersion: {version()}\nLicense: MIT\nRequires-Python: >=3.10\n"
    files[f"{info}/METADATA"] = about.encode()
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
