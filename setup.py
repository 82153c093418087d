"""Builds the native libraries with the package. Without a C++ compiler the package still installs: it then runs on the
NumPy reference, and says so, and takes longer to load weights onto a GPU.

A wheel for others (.ci/wheels.py) is told by the environment what it is for, and must not lack a library:
MONOTAPE_WHEEL_MACHINE and MONOTAPE_WHEEL_PLATFORM, with CXX as the compiler.
"""

import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

MACHINE = os.environ.get("MONOTAPE_WHEEL_MACHINE")  # "x86_64", "aarch64"; None: this one
PLATFORM = os.environ.get("MONOTAPE_WHEEL_PLATFORM")  # "manylinux_2_17_x86_64", ...


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
        compiler = cpu.find_compiler(os.environ.get("CXX") if MACHINE else None)
        for name, builder in (("cpu", cpu), ("cuda", cuda)):
            for stale in (backends / name).glob("*.so"):  # of another machine, left in the build folder
                stale.unlink()
            try:
                builder.build(backends / name, compiler, MACHINE)
            except cpu.BuildError as error:
                if MACHINE:
                    raise
                print(f"monotape: the native {name} library was not built: {error}", file=sys.stderr)


class WheelForEveryPython(bdist_wheel):
    """The libraries are loaded with ctypes and know nothing of Python: one wheel a platform serves all versions."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", PLATFORM or super().get_tag()[2]


setup(
    cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelForEveryPython},
    has_ext_modules=lambda: True,
)
