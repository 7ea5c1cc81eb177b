#!/usr/bin/env python3
"""What the backend of `pip install ./examples/embed/python` asks of Meson and Ninja, which are replaced by programs
that write down what they were told: CUDA only where it is asked for, metadata without a build, and a kept build
directory configured anew."""
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile
from unittest import mock

BACKEND = pathlib.Path(os.environ["SRC"]) / "examples/embed/python/backend.py"
TOOL = """#!/bin/sh
echo "${0##*/} $*" >>"$LOG"
case $0 in
  */meson)
    for last; do :; done
    eval "directory=\\${$(($# - 1))}"
    mkdir -p "$directory"
    touch "$directory/build.ninja" ;;
  */ninja) mkdir -p "$2/examples/embed/python"; echo module >"$2/$3"; echo "[1/1] Compiling C++ object $3.o" ;;
esac
"""


class Pip(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = pathlib.Path(scratch.name)
        for name in ("meson", "ninja", "nvcc"):
            tool = self.scratch / "tools" / name
            tool.parent.mkdir(exist_ok=True)
            tool.write_text(TOOL)
            tool.chmod(0o755)
        self.log = self.scratch / "log"

    def call(self, hook, *arguments, nvcc=True, **environment):
        """A hook as pip calls it: in a process of its own, in an empty environment. What it printed, with its status
        before."""
        (self.scratch / "tools" / "nvcc").chmod(0o755 if nvcc else 0)
        call = (f"import sys; sys.path.insert(0, {str(BACKEND.parent)!r}); sys.dont_write_bytecode = True; import "
                f"backend; ")
        call += f"print(backend.{hook}(*{arguments!r}))"
        path = f"{self.scratch / 'tools'}:/nowhere"
        python = self.scratch / "bin" / "python3"  # beside which no tools lie
        if not python.exists():
            python.parent.mkdir()
            python.symlink_to(sys.executable)
        ran = subprocess.run([python, "-c", call], capture_output=True, text=True,
                             env={"PATH": path + ":/usr/bin:/bin", "LOG": str(self.log), **environment})
        return ran.returncode, (ran.stdout + ran.stderr).strip()

    def asked(self):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines

    def test_metadata_without_a_build(self):
        status, name = self.call("prepare_metadata_for_build_wheel", str(self.scratch))
        self.assertEqual((status, self.asked()), (0, []), name)
        text = (self.scratch / name / "METADATA").read_text()
        self.assertIn(f"\nName: hilt\nVersion: {os.environ['VERSION']}\n", text)
        status, said = self.call("build_wheel", str(self.scratch))
        self.assertEqual(status, 0, said)
        self.assertIn("hilt: compiling 1 files with ", said)
        wheel = said.splitlines()[-1]
        with zipfile.ZipFile(self.scratch / wheel) as archive:
            self.assertEqual(archive.read(f"{name}/METADATA").decode(), text)
            self.assertIn("hilt/__main__.py", archive.namelist())

    def test_cuda_is_asked_for(self):
        def cuda(settings=None, **environment):
            status, text = self.call("build_wheel", str(self.scratch), settings, **environment)
            lines = self.asked()
            return [x for x in lines[0].split() if x.startswith("-Dcuda=")] if status == 0 else text

        self.assertEqual(cuda(), ["-Dcuda=disabled"])
        self.assertEqual(cuda(HILT_CUDA="0"), ["-Dcuda=disabled"])
        self.assertEqual(cuda(HILT_CUDA="1"), ["-Dcuda=enabled"])
        self.assertEqual(cuda({"cuda": "true"}), ["-Dcuda=enabled"])
        self.assertEqual(cuda({"cuda": "0"}, HILT_CUDA="1"), ["-Dcuda=disabled"])

    def test_what_is_refused(self):
        for settings, environment, text in (
            ({"cuda": "maybe"}, {}, "hilt: HILT_CUDA or the config setting cuda (maybe): expected 1 or 0"),
            ({"kuda": "1"}, {}, "hilt: no config setting 'kuda'; there is cuda=1"),
            (None, {"HILT_CUDA": "1", "PATH": f"{self.scratch / 'tools'}"},
             "hilt: CUDA was asked for and there is no nvcc in PATH"),
        ):
            status, said = self.call("prepare_metadata_for_build_wheel", str(self.scratch), settings, nvcc=False,
                                     **environment)
            self.assertEqual((status, said[: len(text)], self.asked()), (1, text, []))

    def test_a_kept_directory_is_configured_anew(self):
        kept = {"HILT_PYTHON_BUILD": str(self.scratch / "kept"), "HILT_PYTHON_OPTIONS": "-Disa=base"}
        for again in (False, True):
            self.assertEqual(self.call("build_wheel", str(self.scratch), **kept)[0], 0)
            meson, counted, ninja = self.asked()
            self.assertEqual("--reconfigure" in meson.split(), again, meson)
            self.assertEqual(meson.split()[-2:], [kept["HILT_PYTHON_BUILD"], str(BACKEND.parents[3])])
            self.assertIn(" -Disa=base ", meson)
            self.assertIn(f"ninja -C {kept['HILT_PYTHON_BUILD']} examples/embed/python/_hilt.", ninja)
            self.assertEqual((counted.split()[-1], ninja.split()[-1][:2]), ("-n", "-j"))

    def test_a_wheel_is_named_for_what_runs_it(self):
        """The stable ABI from CPython 3.12 on; an older one, and one without its lock, for itself."""
        sys.path.insert(0, str(BACKEND.parent))
        import backend

        for version, flags, want in (
            ((3, 10), "d", "cp310-cp310d"), ((3, 11), "", "cp311-cp311"), ((3, 12), "", "cp312-abi3"),
            ((3, 13), "t", "cp313-cp313t"), ((3, 14), "", "cp312-abi3"),
        ):
            with mock.patch.multiple(sys, version_info=version, abiflags=flags):
                self.assertEqual("-".join(backend.tags()[:2]), want)


if __name__ == "__main__":
    unittest.main()
