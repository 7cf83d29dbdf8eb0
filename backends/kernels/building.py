"""How the kernels are compiled: all files at once. Only the build uses this module."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    """setuptools compiles one file after the other, which takes 45 s on any number of cores."""

    def build_extension(self, ext: Extension) -> None:
        """Raises what the compiler raises."""
        compile_files = self.compiler.compile

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_files([source], **options), sources)
                return [file for files in made for file in files]

        self.compiler.compile = compile_at_once
        super().build_extension(ext)
