"""State of a training that all ranks share: collecting, checking and loading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from superbatch.errors import CheckpointError

from ..window.config import Config
from ..window.engine import Engine
from .names import parameter_names, plain_names
from .shards import placed


def shared_state(config: Config, state: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that all ranks share: models, optimizers, schedulers, scaler, float32 masters."""
    # With plain names a checkpoint loads with or without DDP and torch.compile.
    names = _names(config)
    return {
        "models": [_model_state(model) for model in config.models],
        "optimizers": [
            {"kind": _kind(each), "parameters": _groups(each, names), "state": each.state_dict()}
            for each in config.rule.optimizers
        ],
        "schedulers": [{"kind": _kind(each), "state": each.state_dict()} for each in config.rule.schedulers],
        "scaler": None if config.rule.scaler is None else config.rule.scaler.state_dict(),
        "masters": _by_plain_name(config, state["masters"]),
        "extra": dict(extra),
    }


def check_shared(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Check that a saved state fits this program, before any of it is loaded.

    Raises:
        CheckpointError: another model, optimizer or scheduler was saved; the error names the first
            difference.
    """
    config = engine.config
    for kind, here in (
        ("models", config.models),
        ("optimizers", config.rule.optimizers),
        ("schedulers", config.rule.schedulers),
    ):
        # First, because the error of zip(strict=True) is less clear.
        if len(saved[kind]) != len(here):
            raise _mismatch(
                f"The checkpoint has {len(saved[kind])} {kind}, but the Accumulator has {len(here)}"
            )
    for number, (model, state) in enumerate(zip(config.models, saved["models"], strict=True)):
        where = f"model {number}" if len(config.models) > 1 else "the model"
        _check_model(where, _model_state(model)["state"], state["state"])
    names = _names(config)
    for optimizer, state in zip(config.rule.optimizers, saved["optimizers"], strict=True):
        # Compare the class, because state of another optimizer may load but have another meaning.
        _check_kind("optimizer", optimizer, state["kind"])
        _check_groups(_groups(optimizer, names), state["parameters"])
    for scheduler, state in zip(config.rule.schedulers, saved["schedulers"], strict=True):
        _check_kind("scheduler", scheduler, state["kind"])
    if (saved["scaler"] is None) != (config.rule.scaler is None):
        has, lacks = ("a scaler", "none") if config.rule.scaler is None else ("no scaler", "one")
        raise _mismatch(f"The checkpoint has {has}, but the Accumulator has {lacks}")


def load_shared(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Load models, optimizers, schedulers and scaler, which `check_shared` has checked."""
    config = engine.config
    for model, state in zip(config.models, saved["models"], strict=True):
        _load_model(model, state)
    for optimizer, state in zip(config.rule.optimizers, saved["optimizers"], strict=True):
        # In the order of the groups, by which torch numbers an optimizer's state.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.load_state_dict(_placed_state(parameters, state["state"]))
    for scheduler, state in zip(config.rule.schedulers, saved["schedulers"], strict=True):
        scheduler.load_state_dict(state["state"])
    if config.rule.scaler is not None:
        config.rule.scaler.load_state_dict(saved["scaler"])


def masters_here(engine: Engine, saved: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    """Return saved masters by the accumulator's names, with the sharding of the accumulator's masters."""
    if saved is None:
        return None
    names, found = _plain_master_names(engine.config), dict(saved)
    here = engine.state_dict()["masters"] or {}
    for name, master in here.items():
        # Masters with other names remain in `found`, so that `load_state_dict` raises for them.
        if names[name] in found:
            found[name] = placed(found.pop(names[name]), master)
    return found


def _model_state(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    names = plain_names(model, state)
    return {
        "state": {names[key]: value for key, value in state.items()},
        "metadata": {plain: _metadata(state)[path] for path, plain in _modules(model, state).items()},
    }


def _metadata(state: Any) -> Mapping[str, Any]:
    """Return the versions of the modules by their paths; loading may depend on them."""
    return getattr(state, "_metadata", {})


def _modules(model: nn.Module, state: Any) -> dict[str, str]:
    """Return path -> plain path of the modules whose versions are in a state."""
    return plain_names(model, _metadata(state))


def _load_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    state = model.state_dict()
    for key, plain in plain_names(model, state).items():
        state[key] = placed(saved["state"][plain], state[key])
    # Modules read their saved version, e.g. BatchNorm, which has num_batches_tracked since version 2.
    for path, plain in _modules(model, state).items():
        if plain in saved["metadata"]:
            # torch stores versions in an attribute of the mapping.
            state._metadata[path] = saved["metadata"][plain]  # type: ignore[attr-defined]
    model.load_state_dict(state)


def _placed_state(parameters: Sequence[Tensor], state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state in which the tensors of a sharded parameter have its sharding."""
    of_each = {
        index: {
            # Only tensors of the parameter's shape are sharded, not a scalar such as "step".
            key: placed(value, parameters[index]) if _has_shape_of(value, parameters[index]) else value
            for key, value in values.items()
        }
        if isinstance(values, Mapping) and isinstance(index, int)
        else values
        for index, values in state.get("state", {}).items()
    }
    return {**state, "state": of_each} if "state" in state else state


def _has_shape_of(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _names(config: Config) -> dict[Tensor, str]:
    """Return the plain names of parameters; a master has the name of its parameter."""
    names = parameter_names(config.models)
    return {**names, **{master: names[p] for p, master in config.masters.items() if p in names}}


def _plain_master_names(config: Config) -> dict[str, str]:
    """Return the plain name of each master, by its name in the accumulator's state."""
    found: dict[str, str] = {}
    for number, model in enumerate(config.models):
        names = [name for name, _ in model.named_parameters()]
        for name, plain in plain_names(model, names).items():
            found[name if number == 0 else f"models[{number}].{name}"] = f"{number}.{plain}"
    return found


def _by_plain_name(config: Config, masters: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    if masters is None:
        return None
    names = _plain_master_names(config)
    return {names[name]: master for name, master in masters.items()}


def _groups(optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[list[str]]:
    # A tensor outside of the models has an empty name.
    return [[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups]


def _kind(one: object) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"


def _check_model(where: str, here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name in here.keys() ^ saved.keys():
        only = "the checkpoint" if name in saved else "this program"
        raise _mismatch(f"Only {only} has {name!r} of {where}")
    for name, value in here.items():
        other = saved[name]
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            # The dtype too, because copying would round silently.
            for form in ("shape", "dtype"):
                one, two = getattr(other, form), getattr(value, form)
                if one != two:
                    raise _mismatch(
                        f"{name!r} of {where} has the {form} {_as_text(one)} in the checkpoint, but "
                        f"{_as_text(two)} in this program"
                    )


def _as_text(form: Any) -> str:
    return str(tuple(form)) if hasattr(form, "numel") else str(form)


def _check_kind(what: str, here: object, saved: str) -> None:
    if _kind(here) != saved:
        raise _mismatch(f"The checkpoint has the {what} {saved}, but the Accumulator has a {_kind(here)}")


def _check_groups(here: list[list[str]], saved: list[list[str]]) -> None:
    if [len(group) for group in here] != [len(group) for group in saved]:
        sizes = [len(group) for group in saved], [len(group) for group in here]
        raise _mismatch(
            f"An optimizer has groups of {sizes[0]} parameters in the checkpoint, but of {sizes[1]} in this "
            "program"
        )
    # By name and in order, because torch's load_state_dict assigns states by position alone.
    for one, two in zip(chain(*saved), chain(*here), strict=True):
        if one != two:
            raise _mismatch(
                f"An optimizer has {one!r} in the checkpoint, but {two!r} at the same position in this "
                "program"
            )


def _mismatch(text: str) -> CheckpointError:
    return CheckpointError(f"{text}; nothing was loaded. Load the checkpoint into the program that wrote it.")
