"""State of every random generator that a training draws from."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from superbatch.errors import CheckpointError

from ..devices import accelerators, generator_of, generator_states


def random_state(models: Sequence[nn.Module], generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """Return the states of torch's, Python's and NumPy's generators, and of the program's own.

    Examples:
        >>> sorted(random_state([], {"data": torch.Generator()}))
        ['devices', 'generators', 'numpy', 'python', 'torch']
    """
    # A program that has not imported NumPy has no state of it.
    numpy: Any = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "devices": generator_states(accelerators(models)),
        "python": random.getstate(),
        # legacy=False returns a dict of plain values.
        "numpy": None if numpy is None else numpy.random.get_state(legacy=False),
        "generators": {name: generator.get_state() for name, generator in generators.items()},
    }


def check_generators(state: Mapping[str, Any], generators: Mapping[str, torch.Generator]) -> None:
    """Check that the program has the generators that were saved.

    Raises:
        CheckpointError: the checkpoint or the program lacks one.

    Examples:
        >>> check_generators({"generators": {"data": None}}, {})
        Traceback (most recent call last):
        superbatch.errors.CheckpointError: The checkpoint has a generator 'data', but generators= has none...
    """
    for name in state["generators"].keys() ^ generators.keys():
        saved, here = ("a", "none") if name in state["generators"] else ("no", "one")
        raise CheckpointError(
            f"The checkpoint has {saved} generator {name!r}, but generators= has {here}. Pass the same "
            "generators= to save_checkpoint() and load_checkpoint()."
        )


def restore_random(state: Mapping[str, Any], generators: Mapping[str, torch.Generator]) -> None:
    """Set every generator to its saved state; devices that this machine does not have are left out."""
    torch.set_rng_state(state["torch"])
    for name, saved in state["devices"].items():
        device = torch.device(name)
        try:
            generator = generator_of(device)
        except (RuntimeError, AssertionError, NotImplementedError):
            continue  # the checkpoint is from a machine with other devices
        generator.set_state(saved)
    random.setstate(state["python"])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        numpy.random.set_state(state["numpy"])
    for name, generator in generators.items():
        generator.set_state(state["generators"][name])
