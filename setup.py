"""Builds the native libraries with the package. Without a C++ compiler the package still installs: it then runs on the
NumPy reference, and says so, and loads weights onto a GPU more slowly."""

import runpy
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

BACKENDS = Path("src/monotape/backends")
WITH_LIBRARY = ("cpu", "cuda")


class BuildWithLibraries(build_py):
    """Compiles the libraries into the wheel. A development install needs none: it builds them on first use."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        builder = runpy.run_path(str(BACKENDS / "cpu" / "build.py"))
        compiler = builder["find_compiler"]()
        for backend in WITH_LIBRARY:
            folder = Path(self.build_lib) / "monotape" / "backends" / backend
            try:
                builder["build"](folder, compiler, BACKENDS / backend / "native")
            except builder["BuildError"] as error:
                print(f"monotape: the native {backend} library was not built: {error}", file=sys.stderr)


setup(cmdclass={"build_py": BuildWithLibraries}, has_ext_modules=lambda: True)
