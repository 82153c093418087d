"""Builds the native libraries with the package. Without a C++ compiler the package still installs: it then runs on the
NumPy reference, and says so, and takes longer to load weights onto a GPU."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithLibraries(build_py):
    """Compiles the libraries into the wheel. A development install needs none: it builds them on first use."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        sys.path.insert(0, "src")  # the builders need nothing but the standard library
        from monotape.backends.cpu import build as cpu
        from monotape.backends.cuda import library as cuda

        backends = Path(self.build_lib) / "monotape" / "backends"
        for name, builder in (("cpu", cpu), ("cuda", cuda)):
            try:
                builder.build(backends / name, cpu.find_compiler())
            except cpu.BuildError as error:
                print(f"monotape: the native {name} library was not built: {error}", file=sys.stderr)


setup(cmdclass={"build_py": BuildWithLibraries}, has_ext_modules=lambda: True)
