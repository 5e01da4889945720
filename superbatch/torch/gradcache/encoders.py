"""Encoders of a call: their micro-batches, the first pass, and the second pass, which repeats the first."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.batch.containers import is_flat
from superbatch.batch.split import TokenBudget, positive_int
from superbatch.batch.tree import map_arrays, take
from superbatch.errors import InputError
from superbatch.window import Window

from ..window.microbatches import Paths, microbatches_of
from ..window.transfer import Transfer
from ..window.validation import as_models
from .embeddings import Embeddings, tensors_of
from .one_pass import OnePass
from .replay import Replay

Encode = Callable[[Any], Any]
MicrobatchSize = int | TokenBudget


class Encoder:
    """One encoder and its micro-batches.

    Args:
        where: its name, for errors.
        encode: function of a micro-batch that returns its embeddings.
        batch: the batch to split.
        microbatch_size: largest number of samples in a micro-batch, or a TokenBudget; not used for a Window.
        paths: `unsplit` and `per_sample` declarations, relative to its batch.
        device: device to move micro-batches to; None: they are not moved.

    Raises:
        InputError, SplitError: the batch or the size is invalid.

    Examples:
        >>> encoder = Encoder("encode", nn.Linear(2, 1), torch.zeros(5, 2), 2, {}, None)
        >>> encoder.first_pass(OnePass([]), [], on_outputs=print, keep=False)
        [tensor([[...]], grad_fn=<AddmmBackward0>)]
        >>> len(encoder)
        3
    """

    def __init__(
        self,
        where: str,
        encode: Encode,
        batch: Any,
        microbatch_size: MicrobatchSize | None,
        paths: Paths,
        device: torch.device | None,
    ) -> None:
        if not isinstance(microbatch_size, TokenBudget) and not isinstance(batch, Window):
            microbatch_size = positive_int("microbatch_size", microbatch_size)
        _refuse_graph(batch, where)
        self._where, self._encode = where, encode
        self._microbatches, counts, order = microbatches_of(batch, microbatch_size, paths, need_samples=True)
        assert counts is not None
        self._counts, self._paths = counts, paths
        self._transfer = Transfer(device)
        self._replay: Replay | None = None
        self._buffers: OnePass | None = None
        # Embeddings of the last micro-batch, to compare with the second pass.
        self._last: list[Tensor] = []
        # Output of the only micro-batch, with its graph.
        self._only_output: Any = None
        self._gradients: list[dict[int, Tensor]] = []
        self.embeddings = Embeddings(where, counts, order)

    def __len__(self) -> int:
        return len(self._microbatches)

    def first_pass(
        self,
        buffers: OnePass,
        devices: Collection[torch.device],
        *,
        on_outputs: Callable[[list[Tensor]], None],
        keep: bool,
    ) -> None:
        """Encode every micro-batch, and record the state that the second pass needs.

        Only the first micro-batch has a graph, to find the outputs that need a gradient.

        Args:
            buffers: present buffers of the models.
            devices: devices whose generators may be used.
            on_outputs: called with the outputs of the first micro-batch that have a graph.
            keep: keep the graph of the only micro-batch, which then need not be repeated.
        """
        self._buffers, self._replay = buffers, (replay := Replay(devices))
        for index in range(len(self)):
            # In the large batch all samples use the same buffers.
            buffers.rewind()
            replay.record()
            with torch.set_grad_enabled(torch.is_grad_enabled() and not index):
                output = self._run(index)
            self.embeddings.add(output)
            # Before the next `rewind`, which restores the buffers.
            buffers.check(index)
            if not index:
                on_outputs(
                    [tensor for _, tensor in tensors_of(output, self._where)[0] if tensor.requires_grad]
                )
            if keep:
                self._only_output = output
            del output  # and its graph, before the next forward
        # With micro-batches of one size, a buffer that counts samples looks like one that counts calls.
        if buffers.moved and len(self) > 1 and len(set(self._counts)) == 1:
            self._try_fewer(buffers, replay)

    def take_gradients(self) -> None:
        """Store the gradients of the embeddings after the loss's backward, and free the embeddings."""
        self._gradients = [self.embeddings.gradients(index) for index in range(len(self))]
        self._last = self.embeddings.of_microbatch(-1)
        self.embeddings.clear()

    def second_pass(self, backward: Callable[..., None]) -> None:
        """Encode every micro-batch again, with a graph, and run backward from its cached gradient.

        Args:
            backward: called with the outputs of a micro-batch, their gradients, and ``first=True`` for the
                first micro-batch.

        Raises:
            InputError: the second pass differs from the first.
        """
        if not any(self._gradients):
            return  # the loss does not use these embeddings, or no parameter is trainable
        for index in range(len(self)):
            # Removed from the list, so that it is freed after its backward.
            gradients, self._gradients[index] = self._gradients[index], {}
            backward(*self._second_forward(index, gradients), first=not index)

    def _second_forward(self, index: int, gradients: dict[int, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        tensors = [tensor for _, tensor in tensors_of(self._repeat(index), self._where)[0]]
        # Only the last micro-batch is compared, because more comparisons need more embeddings in memory.
        if index + 1 == len(self) and not _repeated(self._last, tensors):
            raise self._not_repeated(f"other embeddings of micro-batch {index}")
        # There is no cached gradient for an output that had no graph in the first pass.
        if any(
            now.requires_grad > before for now, before in zip(tensors, self.embeddings.needs, strict=True)
        ):
            raise self._not_repeated(
                f"a graph in micro-batch {index} for an output that had none in the first"
            )
        numbers = [number for number in gradients if tensors[number].requires_grad]
        return [tensors[number] for number in numbers], [gradients[number] for number in numbers]

    def _repeat(self, index: int) -> Any:
        if self._only_output is not None:
            output, self._only_output = self._only_output, None
            return output
        assert self._buffers is not None and self._replay is not None
        self._buffers.rewind()
        self._replay.back_to(index)
        return self._run(index)

    def _run(self, index: int) -> Any:
        output = self._encode(_fresh(self._transfer.take(self._microbatches, index)))
        self._transfer.launched(self._microbatches, index)
        return output

    def _try_fewer(self, buffers: OnePass, replay: Replay) -> None:
        """Check with one sample that changes of buffers do not depend on the number of samples."""
        if self._counts[0] == 1:
            return
        replay.record()
        buffers.rewind()
        replay.back_to(0)
        with torch.no_grad():
            # With one sample in place of several, a count of samples differs, but not a count of calls.
            self._encode(take(self._transfer.take(self._microbatches, 0), 0, 1, **self._paths))
        buffers.check(-1)
        # The generators return to their state at the end of the first pass.
        replay.back_to(-1)

    def _not_repeated(self, what: str) -> InputError:
        return InputError(
            f"The second pass of {self._where} returned {what}, but it must repeat the first pass, to which "
            "the cached gradients belong. Make encode depend only on its micro-batch, the models and the "
            "global generators (torch, Python, NumPy), without a torch.Generator or counter of its own and "
            "without operations in place on the micro-batch."
        )


def _fresh(node: Any) -> Any:
    """Return a micro-batch in new containers, because encode may remove entries of a dict."""
    if isinstance(node, dict | UserDict):
        new = copy.copy(node)
        for name, value in node.items():
            new[name] = _fresh(value)
        return new
    # A flat list contains no containers.
    if type(node) in (list, tuple) and not is_flat(node):
        return type(node)(map(_fresh, node))
    return list(node) if type(node) is list else node


def _repeated(first: list[Tensor], second: list[Tensor]) -> bool:
    """Return whether embeddings equal those of the first pass, up to rounding."""
    for before, now in zip(first, second, strict=True):
        if before.shape != now.shape:
            return False
        if torch.equal(before, now):
            continue
        if not (now.is_floating_point() or now.is_complex()):
            return False
        # A NaN in both is no difference.
        before, now = before.nan_to_num(), now.detach().nan_to_num()
        # The first half of the digits must agree: another kernel changes less, another dropout mask more.
        rounding = torch.finfo(now.dtype).eps ** 0.5
        if not torch.linalg.vector_norm(now - before) <= rounding * torch.linalg.vector_norm(before):
            return False
    return True


def _refuse_graph(batch: Any, where: str) -> None:
    def check(leaf: Any) -> Any:
        # A leaf is allowed, because its gradient adds up over the micro-batches.
        if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
            raise InputError(
                f"The batch of {where} contains a tensor of shape {tuple(leaf.shape)} with a graph, but "
                "only one micro-batch could run backward through it. Detach it, or compute it inside encode."
            )
        return leaf

    for part in batch if isinstance(batch, Window) else [batch]:
        map_arrays(check, part)


def modules_of(*things: Any) -> list[nn.Module]:
    """Return the modules of callables that are modules, methods of modules, or partials of these.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> [found is layer for found in modules_of(layer, layer.forward, partial(layer), print)]
        [True, True, True]
    """
    found: list[nn.Module] = []
    for thing in things:
        while isinstance(thing, partial):
            thing = thing.func
        owner = thing if isinstance(thing, nn.Module) else getattr(thing, "__self__", None)
        found += [owner] if isinstance(owner, nn.Module) else []
    return found


def all_models(encoders: Iterable[Encode], loss_fn: Any, models: Any) -> list[nn.Module]:
    """Return every module of a call: `models`, and the modules of the callables.

    Returns:
        The modules, each once, without those that are parts of others.

    Raises:
        InputError: `models` is None, and an encoder is not a module or a method of one.

    Examples:
        >>> len(all_models([nn.Linear(1, 1)], nn.CrossEntropyLoss(), None))
        2
    """
    encoders = list(encoders)
    named = () if models is None else as_models(models)
    unknown = [encode for encode in encoders if not modules_of(encode)]
    if models is None and unknown:
        raise InputError(
            f"The models of encode={unknown[0]!r} are unknown, so they cannot be checked for BatchNorm or "
            "restored after an error. Pass models=[...] with every module that encode and loss_fn use."
        )
    found = [*named, *modules_of(*encoders, loss_fn)]
    # Without parts of other models, whose buffers would be copied twice.
    parts = {id(part) for model in found for part in model.modules() if part is not model}
    return list({id(model): model for model in found if id(model) not in parts}.values())


def as_encoders(
    encode: Any,
    batch: Any,
    microbatch_size: Any,
    paths: Mapping[str, Collection[str]],
    models: Sequence[nn.Module],
) -> list[Encoder]:
    """Return the encoder of a callable, or the encoders of a mapping.

    Args:
        encode: a callable, or a mapping of names to callables.
        batch: the batch, or a mapping of the same names to batches.
        microbatch_size: for all encoders, or a mapping of the same names.
        paths: `unsplit` and `per_sample`; with several encoders each path begins with a name.
        models: models whose device micro-batches are moved to, if the encoder's own is unknown.

    Returns:
        The encoders, in the order of the mapping.

    Raises:
        InputError, SplitError: names differ, or a batch, a size or a path is invalid.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> batch = {"query": torch.zeros(3, 2), "document": torch.zeros(8, 2)}
        >>> [len(e) for e in as_encoders({"query": layer, "document": layer}, batch, 2, {}, [layer])]
        [2, 4]
    """
    if not isinstance(encode, Mapping | nn.ModuleDict):
        declared = {kind: tuple(names) for kind, names in paths.items()}
        return [Encoder("encode", encode, batch, microbatch_size, declared, _device(encode, models))]
    names = list(encode)
    for what, given in (("batch", batch), ("microbatch_size", microbatch_size)):
        # One number for microbatch_size holds for every encoder.
        if isinstance(given, Mapping) or what == "batch":
            _check_names(what, given, names)
    return [
        Encoder(
            f"encode[{name!r}]",
            encode[name],
            batch[name],
            microbatch_size[name] if isinstance(microbatch_size, Mapping) else microbatch_size,
            _below(name, paths, names),
            _device(encode[name], models),
        )
        for name in names
    ]


def _check_names(what: str, given: Any, names: list[str]) -> None:
    found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
    if found != sorted(names) or not names:
        raise InputError(
            f"The encoders are {names}, but the {what} is {found}. Pass a mapping with the names of the "
            f"encoders as {what}."
        )


def _below(name: str, paths: Mapping[str, Collection[str]], names: list[str]) -> Paths:
    """Return the declared paths that begin with a name, without the name."""
    for path in (path for declared in paths.values() for path in declared):
        if path.partition(".")[0] not in names or not path.partition(".")[2]:
            raise InputError(
                f"The path {path!r} does not begin with the name of an encoder ({names}). Begin the path "
                "with the encoder's name, as in 'query.ids'."
            )
    # With the dot, so that "query" does not match "query_ids.x".
    prefix = f"{name}."
    return {
        kind: tuple(path[len(prefix) :] for path in declared if path.startswith(prefix))
        for kind, declared in paths.items()
    }


def _device(encode: Any, models: Sequence[nn.Module]) -> torch.device | None:
    """Return the device to which an encoder's micro-batches are moved; None: they are not moved."""
    owners = modules_of(encode) or models
    devices = {parameter.device for model in owners for parameter in model.parameters()}
    # A model on several devices must move its inputs itself.
    device = devices.pop() if len(devices) == 1 else None
    return None if device is None or device.type == "cpu" else device
