"""How kernels are compiled: files that changed, all at once. Only the build uses this module."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext

_OF_ALL = ("backends/kernels/*.h", "pyproject.toml")


class BuildKernels(build_ext):
    """setuptools compiles one file after the other, which takes 45 s on any number of cores.

    For an editable install it compiles all of them each time, in a folder that is gone afterwards.
    """

    def build_extension(self, ext: Extension) -> None:
        """Raises what the compiler raises."""
        compile_files = self.compiler.compile
        changed = max(path.stat().st_mtime for one in _OF_ALL for path in Path().glob(one))

        def compile_file(source: str, options: dict[str, Any]) -> list[str]:
            (made,) = self.compiler.object_filenames([source], output_dir=options["output_dir"])
            newest = max(changed, Path(source).stat().st_mtime)
            if Path(made).exists() and Path(made).stat().st_mtime > newest:
                return [made]
            compiled: list[str] = compile_files([source], **options)
            return compiled

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            del options["output_dir"]
            asked = repr((getattr(self.compiler, "compiler_so_cxx", None), self.plat_name, options))
            options["output_dir"] = f"build/kernels-{sha256(asked.encode()).hexdigest()[:8]}"
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_file(source, options), sources)
                return [file for files in made for file in files]

        self.compiler.compile = compile_at_once
        super().build_extension(ext)
