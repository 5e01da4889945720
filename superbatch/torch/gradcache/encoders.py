"""Encoders of a call: their micro-batches, a first pass, and a second one that repeats it bit for bit."""

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
        encode: from a micro-batch to embeddings.
        batch: to be split.
        microbatch_size: most samples of a micro-batch, or a TokenBudget; a Window needs none.
        paths: `unsplit` and `per_sample` declarations, relative to its batch.
        device: where micro-batches are moved; None: nowhere.

    Raises:
        InputError, SplitError: the batch or the size is not valid.

    Examples:
        >>> encoder = Encoder("encode", nn.Linear(2, 1), torch.zeros(5, 2), 2, {}, None)
        >>> encoder.first_pass(OnePass([]), [], look=print, keep=False)
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
        self._pieces, counts, order = microbatches_of(batch, microbatch_size, paths, need_samples=True)
        assert counts is not None
        self._counts, self._paths = counts, paths
        self._transfer = Transfer(device)
        self._replay: Replay | None = None
        self._buffers: OnePass | None = None
        # Of the last micro-batch, for the comparison with the second pass.
        self._last: list[Tensor] = []
        # The output of a single micro-batch, with its graph.
        self._kept: Any = None
        self._gradients: list[dict[int, Tensor]] = []
        self.embeddings = Embeddings(where, counts, order)

    def __len__(self) -> int:
        return len(self._pieces)

    def first_pass(
        self,
        buffers: OnePass,
        devices: Collection[torch.device],
        *,
        look: Callable[[list[Tensor]], None],
        keep: bool,
    ) -> None:
        """Encode every micro-batch, and record the state that the second pass needs.

        The first one alone is run with a graph, to show which outputs need a gradient.

        Args:
            buffers: of the models, as they are now.
            devices: whose generators may be drawn from.
            look: called with the outputs of the first micro-batch that have a graph.
            keep: the graph of the only micro-batch, which then need not be repeated.
        """
        self._buffers, self._replay = buffers, (replay := Replay(devices))
        for index in range(len(self)):
            # As in the large batch, where all samples see the buffers as they were.
            buffers.rewind()
            replay.note()
            # The first one alone has a graph: it shows which outputs need a gradient.
            with torch.set_grad_enabled(torch.is_grad_enabled() and not index):
                output = self._run(index)
            self.embeddings.add(output)
            # Before the next `rewind`, which restores the buffers.
            buffers.check(index)
            if not index:
                look([tensor for _, tensor in tensors_of(output, self._where)[0] if tensor.requires_grad])
            if keep:
                self._kept = output
            del output  # and its graph, before the next forward
        # Micro-batches of one size cannot show a buffer that depends on the number of samples.
        if buffers.moved and len(self) > 1 and len(set(self._counts)) == 1:
            self._try_fewer(buffers, replay)

    def take_gradients(self) -> None:
        """Take over the gradients that the loss's backward left, and free the embeddings."""
        self._gradients = [self.embeddings.gradients(index) for index in range(len(self))]
        self._last = self.embeddings.seen(-1)
        self.embeddings.clear()

    def second_pass(self, backward: Callable[..., None]) -> None:
        """Encode every micro-batch again, with a graph, and run backward from its cached gradient.

        Args:
            backward: called with the outputs of a micro-batch, their gradients, and whether it is the
                `first`.

        Raises:
            InputError: the second pass differs from the first one.
        """
        if not any(self._gradients):
            return  # the loss does not read these embeddings, or nothing here can be trained
        for index in range(len(self)):
            # Out of the list, so that it is freed after its backward.
            gradients, self._gradients[index] = self._gradients[index], {}
            backward(*self._again(index, gradients), first=not index)

    def _again(self, index: int, gradients: dict[int, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        tensors = [tensor for _, tensor in tensors_of(self._repeat(index), self._where)[0]]
        # The last one alone, as all embeddings would have to be kept for more.
        if index + 1 == len(self) and not _repeated(self._last, tensors):
            raise self._not_repeated(f"other embeddings of micro-batch {index}")
        # No gradient was cached for an output that had no graph.
        if any(
            now.requires_grad > before for now, before in zip(tensors, self.embeddings.needs, strict=True)
        ):
            raise self._not_repeated(
                f"a graph in micro-batch {index} for an output that had none in the first"
            )
        places = [place for place in gradients if tensors[place].requires_grad]
        return [tensors[place] for place in places], [gradients[place] for place in places]

    def _repeat(self, index: int) -> Any:
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return kept
        assert self._buffers is not None and self._replay is not None
        # The buffers and the random numbers of the first pass.
        self._buffers.rewind()
        self._replay.back_to(index)
        return self._run(index)

    def _run(self, index: int) -> Any:
        output = self._encode(_fresh(self._transfer.take(self._pieces, index)))
        self._transfer.launched(self._pieces, index)
        return output

    def _try_fewer(self, buffers: OnePass, replay: Replay) -> None:
        """Check that changes of buffers do not depend on the number of samples, if it is always the same."""
        if self._counts[0] == 1:
            return
        replay.note()
        buffers.rewind()
        replay.back_to(0)
        with torch.no_grad():
            # One sample in place of several: a count of samples differs, a count of calls does not.
            self._encode(take(self._transfer.take(self._pieces, 0), 0, 1, **self._paths))
        buffers.check(-1)
        # The first pass ended here.
        replay.back_to(-1)

    def _not_repeated(self, what: str) -> InputError:
        return InputError(
            f"The second pass of {self._where} gave {what}, and it must repeat the first, to which the "
            "cached gradients belong. Let encode depend on its micro-batch, the models and the global "
            "generators (torch, Python, NumPy) alone, and leave these as they are: no torch.Generator or "
            "counter of its own, no operation in place on the micro-batch."
        )


def _fresh(node: Any) -> Any:
    """Return a micro-batch in new containers, as encode may remove entries of a dict."""
    if isinstance(node, dict | UserDict):
        new = copy.copy(node)
        for name, value in node.items():
            new[name] = _fresh(value)
        return new
    # A flat list holds no containers.
    if type(node) in (list, tuple) and not is_flat(node):
        return type(node)(map(_fresh, node))
    return list(node) if type(node) is list else node


def _repeated(first: list[Tensor], second: list[Tensor]) -> bool:
    """Tell if embeddings are those of the first pass, up to the rounding of kernels without a graph."""
    for before, now in zip(first, second, strict=True):
        if before.shape != now.shape:
            return False
        if torch.equal(before, now):
            continue
        if not (now.is_floating_point() or now.is_complex()):
            return False
        # A NaN in both is no difference.
        before, now = before.nan_to_num(), now.detach().nan_to_num()
        # Half of the digits: another kernel differs by less, another dropout mask by more.
        rounding = torch.finfo(now.dtype).eps ** 0.5
        if not torch.linalg.vector_norm(now - before) <= rounding * torch.linalg.vector_norm(before):
            return False
    return True


def _refuse_graph(batch: Any, where: str) -> None:
    def look(leaf: Any) -> Any:
        # A leaf is fine: its gradient adds up over the micro-batches.
        if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
            raise InputError(
                f"The batch of {where} has a tensor of shape {tuple(leaf.shape)} with a graph, through which "
                "every micro-batch would run backward. Detach it, or compute it from its inputs inside "
                "encode."
            )
        return leaf

    for part in batch if isinstance(batch, Window) else [batch]:
        map_arrays(look, part)


def modules_of(*things: Any) -> list[nn.Module]:
    """Find the modules that callables stand for: a module itself, its methods, and partials of these.

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
    """Every module of a call: those that were named, and those that the callables are.

    Args:
        encoders: modules or functions.
        loss_fn: the loss.
        models: a module, several, or None where the encoders are modules or methods of modules.

    Returns:
        The modules, each once, without those that are parts of others.

    Raises:
        InputError: an encoder is something else, and no models are named.

    Examples:
        >>> len(all_models([nn.Linear(1, 1)], nn.CrossEntropyLoss(), None))
        2
    """
    encoders = list(encoders)
    named = () if models is None else as_models(models)
    unknown = [encode for encode in encoders if not modules_of(encode)]
    if models is None and unknown:
        raise InputError(
            f"encode={unknown[0]!r} has no models, and without its parameters and buffers a failed call "
            "cannot be undone, or BatchNorm found. Pass models=[...], every module that encode uses, and "
            "the loss's if it has any."
        )
    found = [*named, *modules_of(*encoders, loss_fn)]
    # A part belongs to its model; its buffers would be kept twice.
    parts = {id(part) for model in found for part in model.modules() if part is not model}
    return list({id(model): model for model in found if id(model) not in parts}.values())


def as_encoders(
    encode: Any,
    batch: Any,
    microbatch_size: Any,
    paths: Mapping[str, Collection[str]],
    models: Sequence[nn.Module],
) -> list[Encoder]:
    """Make the encoders: one of a callable, or one for each name of a mapping.

    Args:
        encode: a callable, or a mapping of names to callables.
        batch: the batch, or a mapping of the same names to batches.
        microbatch_size: for all encoders, or a mapping of the same names.
        paths: `unsplit` and `per_sample`; with several encoders each path begins with a name.
        models: whose device micro-batches are moved to, where an encoder's own is not known.

    Returns:
        The encoders, in the order of the mapping.

    Raises:
        InputError, SplitError: something does not go together.

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
            f"The encoders are {names}, and the {what} is {found}: each encoder has its own {what}. Pass a "
            f"mapping with the same names as {what}."
        )


def _below(name: str, paths: Mapping[str, Collection[str]], names: list[str]) -> Paths:
    """The declared paths that begin with a name, without it."""
    for path in (path for declared in paths.values() for path in declared):
        if path.partition(".")[0] not in names or not path.partition(".")[2]:
            raise InputError(
                f"The path {path!r} names no part of one encoder's batch (encoders {names}). Begin with the "
                "encoder's name, as in 'query.ids'."
            )
    # With the dot: "query" is no beginning of "query_ids.x".
    prefix = f"{name}."
    return {
        kind: tuple(path[len(prefix) :] for path in declared if path.startswith(prefix))
        for kind, declared in paths.items()
    }


def _device(encode: Any, models: Sequence[nn.Module]) -> torch.device | None:
    """Return the device to which an encoder's micro-batches are moved; None: they are not moved."""
    owners = modules_of(encode) or models
    devices = {parameter.device for model in owners for parameter in model.parameters()}
    # A model on several devices moves its inputs by itself.
    device = devices.pop() if len(devices) == 1 else None
    return None if device is None or device.type == "cpu" else device
