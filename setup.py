"""The one thing that pyproject.toml cannot say yet without a warning: the extension, which is left out where there is no C compiler."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvstored.native._copies",
            ["kvstored/native/copies.c"],
            depends=[
                f"kvstored/native/{name}.h"
                for name in (
                    "batch",
                    "hashed_copy",
                    "pieces",
                    "places",
                    "projection",
                    "spread",
                    "third_party/xxhash",
                )
            ],
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
