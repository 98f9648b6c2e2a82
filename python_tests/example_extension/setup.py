"""An extension that compiles the noise kernel of dpkernels into itself. Needs no torch."""

import pybind11
from setuptools import Extension, setup

import dpkernels

noisy = Extension(
    "noisy",
    ["noisy.cpp", *dpkernels.kernel_sources("noise")],
    include_dirs=[pybind11.get_include(), *dpkernels.include_paths()],
    extra_compile_args=["-std=c++17", "-O3"],
    language="c++",
)
setup(name="noisy", ext_modules=[noisy])
