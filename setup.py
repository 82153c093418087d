"""Builds the native CPU library with the package. Without a C++ compiler the package still installs: it then runs
on the NumPy reference, and says so."""

import runpy
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CPU = Path("src/monotape/backends/cpu")


class BuildWithLibrary(build_py):
    """Compiles the library into the wheel. A development install needs none: it builds on first use."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        builder = runpy.run_path(str(CPU / "build.py"))
        try:
            folder = Path(self.build_lib) / "monotape" / "backends" / "cpu"
            builder["build"](folder, builder["find_compiler"]())
        except builder["BuildError"] as error:
            print(f"monotape: the native CPU library was not built: {error}", file=sys.stderr)


setup(cmdclass={"build_py": BuildWithLibrary}, has_ext_modules=lambda: True)
