"""Every module of the GPU path can be imported with the installed versions; numba compiles some of them at import."""

import importlib
import pkgutil

ROOTS = ("gpu", "ipc", "runtime.pool", "benchmarks.gpu_check")


def modules() -> list[str]:
    packages = {root: importlib.import_module(root).__path__ for root in ROOTS}
    found = [module.name for root, path in packages.items() for module in pkgutil.walk_packages(path, f"{root}.")]
    return [name for name in found if not name.endswith("__main__")]


def test_the_modules_of_the_gpu_path_can_be_imported() -> None:
    for module in modules():
        importlib.import_module(module)
