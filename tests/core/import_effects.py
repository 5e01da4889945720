"""Import every module of superbatch in this process and print each change of global state on one line.

`python -m tests.core.import_effects ROOT`, where ROOT holds superbatch/. The dependencies of superbatch are
imported before the first snapshot. So their own effects (scikit-learn sets environment variables) do not
count.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import pkgutil
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from tests import isolation
from tests.core.layers import eager_modules


def patched() -> dict[str, int]:
    """Return the id of each attribute of the classes of torch that a library might patch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    owners = (
        torch.Tensor,
        torch.nn.Module,
        torch.optim.Optimizer,
        torch.autograd,
        torch.optim.SGD,
        torch.optim.AdamW,
    )
    return {f"{owner.__name__}.{name}": id(value) for owner in owners for name, value in vars(owner).items()}


def global_state() -> dict[str, Any]:
    """Return the global state that an import might change."""
    torch = sys.modules.get("torch")
    return {
        "random state": hash(random.getstate()),
        "random state of torch": None if torch is None else torch.random.get_rng_state().tolist(),
        "warnings filters": list(warnings.filters),
        "log handlers": list(logging.getLogger().handlers),
        "log level": logging.getLogger().level,
        "sys.path": list(sys.path),
        "sys.excepthook": sys.excepthook,
        "import hooks": list(sys.meta_path),
        "interrupt handler": signal.getsignal(signal.SIGINT),
    }


def import_everything(root: Path) -> int:
    """Import every module below `root` whose dependencies are installed; return the number of modules."""
    superbatch = importlib.import_module("superbatch")
    assert Path(superbatch.__file__ or "").resolve().is_relative_to(root.resolve()), superbatch.__file__
    modules = [module.name for module in pkgutil.walk_packages(superbatch.__path__, "superbatch.")]
    for name in modules:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # only an optional dependency may be missing
            if (error.name or "").split(".")[0] == "superbatch":
                raise
            print(f"left out: {name}, {error}", file=sys.stderr)
    return len(modules)


def main() -> None:
    root = Path(sys.argv[1])
    sys.path.insert(0, str(root))
    for module in sorted(eager_modules(root)):
        with contextlib.suppress(ModuleNotFoundError):  # not installed, or the name of an object
            importlib.import_module(module)
    before, seen, identities = isolation.take_snapshot(), global_state(), patched()
    print(import_everything(root), "modules")
    print(*isolation.leaks(before, {}), sep="\n")
    now, after = global_state(), patched()
    print(*(f"{name}: changed" for name in seen if seen[name] != now[name]), sep="\n")
    print(*(f"{name}: patched" for name in identities if identities[name] != after.get(name)), sep="\n")


if __name__ == "__main__":
    main()
