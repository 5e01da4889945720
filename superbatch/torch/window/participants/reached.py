"""Search for the state that a forward can use: attributes of modules, and the closure of a loss function.

The search follows modules, plain containers, objects of the user's classes, and functions. Of a function it
follows closure cells, defaults, arguments of `functools.partial`, the object of a bound method, and the
globals that its code names. It returns tables of bindings, each with a name for messages.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import (
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from torch import Tensor, nn

from superbatch.torch.module_tables import buffers_of, children_of, parameters_of

# Limits the search in linked objects such as trees; state is seldom deeper than `self.a.b["c"][0]`.
DEEPEST = 4  # containers, objects and functions inside each other
LONGEST = 4096  # entries of a container; a longer one is data, not state

# Attributes that torch itself sets in a module; all others in its `__dict__` are the user's.
_INTERNAL = frozenset(nn.Module().__dict__) - {"_parameters"}
# Types of class attributes that may be state; methods and annotations are not.
_OF_CLASSES = (Tensor, float, list, deque)
_FOREIGN = frozenset({"torch", "superbatch", "numpy", "builtins"}) | sys.stdlib_module_names
# Libraries with training loops. A module may refer to its loop, which counts steps and logs in no forward.
_HOSTS = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"})


@dataclass(frozen=True)
class Table:
    """Bindings in a dictionary, list, deque, tuple, class, closure cell, or object with slots.

    Attributes:
        name: name of the module or the variable, for messages.
        content: the object with the bindings; a tuple's cannot change, but its tensors may be written.
        keys: the keys to read, or the slots of an object; None: all keys of a dictionary.
        own: True for attributes of a module or an object, False for a container or variables of a function.
        of_loss_fn: only the loss function refers to it: its variable, or an object that it uses.
    """

    name: str
    content: Any
    keys: frozenset[Any] | None = None
    own: bool = False
    of_loss_fn: bool = False

    @property
    def can_be_cut(self) -> bool:
        """True if the table can be restricted to some keys."""
        return self.keys is not None or isinstance(self.content, dict)

    def read(self) -> dict[Any, Any]:
        """Return the present bindings; a list is one binding, to a tuple of its entries.

        Examples:
            >>> Table("queue", [1, 2]).read()
            {None: (1, 2)}
        """
        if isinstance(self.content, CellType):
            try:
                return {None: self.content.cell_contents}
            except ValueError:  # the enclosing function has not yet assigned the variable
                return {}
        if isinstance(self.content, list | deque | tuple):
            return {None: tuple(self.content)}
        content = self.content
        # Only values that may be state, because a class may have a hundred methods and annotations.
        if isinstance(content, type):
            return {key: value for key, value in vars(content).items() if isinstance(value, _OF_CLASSES)}
        if not isinstance(content, dict):
            # hasattr, because reading a slot that was never assigned raises.
            return {key: getattr(content, key) for key in self.keys or () if hasattr(content, key)}
        if self.keys is not None:
            return {key: content[key] for key in self.keys if key in content}
        if not self.own:
            return dict(content)
        return {key: value for key, value in content.items() if key not in _INTERNAL}

    def write(self, key: Any, value: Any) -> None:
        """Bind a key to a value.

        Examples:
            >>> table = Table("centers", {"a": 1})
            >>> table.write("a", 2)
            >>> table.content
            {'a': 2}
        """
        if isinstance(self.content, CellType):
            self.content.cell_contents = value
        elif isinstance(self.content, list | deque):
            # In place, because other names may be bound to the same list. A deque keeps its maxlen.
            self.content.clear()
            self.content.extend(value)
        elif isinstance(self.content, type):
            setattr(self.content, key, value)
        elif isinstance(self.content, dict):
            self.content[key] = value
        else:
            object.__setattr__(self.content, key, value)  # works for a frozen dataclass too

    def unbind(self, key: Any) -> None:
        """Remove a key that was not bound before.

        Examples:
            >>> table = Table("centers", {"a": 1, "b": 2})
            >>> table.unbind("b")
            >>> table.content
            {'a': 1}
        """
        if isinstance(self.content, CellType):
            del self.content.cell_contents
        elif isinstance(self.content, dict):
            self.content.pop(key, None)
        elif isinstance(self.content, type):
            delattr(self.content, key)
        elif self.keys is not None:
            object.__delattr__(self.content, key)

    def name_of(self, key: Any) -> str:
        """Return the name of a binding.

        Examples:
            >>> Table("loss", {}, own=True).name_of("center"), Table("banks", {}).name_of("a")
            ('loss.center', "banks['a']")
        """
        if key is None and not isinstance(self.content, dict):
            return self.name
        if self.own:
            return f"{self.name}.{key}" if self.name else str(key)
        return str(key) if self.keys is not None else f"{self.name}[{key!r}]"


@dataclass(frozen=True)
class Reached:
    """Result of a search.

    Attributes:
        tables: the tables of bindings, including parameters of modules, without buffers.
        outside: modules that are in none of the models, with their names.
        names: names of all modules.
        objects: objects of the user's classes that have tables.
    """

    tables: list[Table]
    outside: list[tuple[str, nn.Module]]
    names: dict[nn.Module, str]
    objects: list[Any] = field(default_factory=list)

    def buffer_tables(self, *, inside: bool = False) -> list[Table]:
        """Return the buffers of modules that are in none of the models, or with `inside` of all modules."""
        modules = ((name, module) for module, name in self.names.items()) if inside else self.outside
        return [Table(name, buffers_of(module), own=True) for name, module in modules]


def reach(models: Iterable[nn.Module], functions: Iterable[Callable[..., Any]]) -> Reached:
    """Find the state that models and functions can use.

    Args:
        models: the models that are trained.
        functions: functions that call them, such as the loss function.

    Examples:
        >>> model, teacher = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> def loss_fn(x, teacher=teacher):
        ...     return (model(x) - teacher(x)).square().mean()
        >>> reach([model], [loss_fn]).outside
        [('teacher', Linear(in_features=2, out_features=1, bias=True))]
    """
    search = _Search()
    for index, model in enumerate(models):
        search.module(f"models[{index}]" if index else "", model, inside=True)
    # Models first, so that a teacher inside a model is not listed as `outside`.
    search.descend()
    for function in functions:
        search.queue.append(("", function, 0, True))
    search.descend()
    return Reached(search.tables, search.outside, search.names, search.objects)


class _Search:
    """A search that visits each object once."""

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self.outside: list[tuple[str, nn.Module]] = []
        self.names: dict[nn.Module, str] = {}
        self.objects: list[Any] = []
        self.queue: deque[tuple[str, Any, int, bool]] = deque()
        self._entered: dict[int, Any] = {}  # objects are held, because the id of a freed one may be reused

    def descend(self) -> None:
        while self.queue:
            self._visit(*self.queue.popleft())

    def module(self, name: str, root: nn.Module, *, inside: bool = False) -> None:
        for path, module in root.named_modules():
            # A module that was visited before keeps its first name.
            if self._enter(module):
                where = ".".join(filter(None, (name, path)))
                self.names[module] = where
                if not inside:
                    self.outside.append((where, module))
                self.tables.append(Table(where, parameters_of(module), own=True))
                self._table(_attributes(where, module), 0)
                if not _is_foreign(type(module)):
                    # The children too, because a forward may replace one.
                    self.tables.append(Table(where, children_of(module), own=True))
                    self._class(where, type(module), of_loss_fn=False)

    def _visit(self, name: str, value: Any, depth: int, of_loss_fn: bool) -> None:
        if isinstance(value, nn.Module):
            self.module(name, value)
        # Imported modules and classes hold code; `_class` reads the class of a user's object.
        elif depth > DEEPEST or isinstance(value, type | ModuleType):
            return
        elif isinstance(value, (functools.partial, FunctionType, MethodType)):
            # A function that only a module holds is not followed: its forward may never call it.
            if of_loss_fn and self._enter(value):
                self._function(name, value, depth)
        elif isinstance(value, list | deque | dict | tuple):
            self._container(name, value, depth, of_loss_fn)
        elif (slots := _slots_of(value)) is not None and self._enter(value):
            self._object(name, value, slots, depth, of_loss_fn)

    def _object(self, name: str, value: Any, slots: frozenset[str], depth: int, of_loss_fn: bool) -> None:
        # An object of a class with slots may not support weak references.
        if hasattr(value, "__weakref__"):
            self.objects.append(value)
        shown, attributes = name or type(value).__name__, getattr(value, "__dict__", None)
        if attributes is not None:
            self._table(Table(shown, attributes, own=True, of_loss_fn=of_loss_fn), depth)
        if slots:
            self._table(Table(shown, value, slots, own=True, of_loss_fn=of_loss_fn), depth)
        self._class(name, type(value), of_loss_fn=of_loss_fn)
        # If the loss function is a callable object, its __call__ is followed as a function.
        called = getattr(type(value), "__call__", None)  # noqa: B004  (the code itself is needed)
        if of_loss_fn and isinstance(called, FunctionType):
            self._queue("", called, depth + 1, of_loss_fn=True)

    def _container(self, name: str, value: Any, depth: int, of_loss_fn: bool) -> None:
        # A longer container is data, such as the samples of a dataset.
        if len(value) > LONGEST or not self._enter(value):
            return
        if isinstance(value, dict):
            self._table(Table(name, value, of_loss_fn=of_loss_fn), depth)
            return
        self.tables.append(Table(name, value, of_loss_fn=of_loss_fn))
        for index, item in enumerate(value):
            self._queue(f"{name}[{index}]", item, depth + 1, of_loss_fn=of_loss_fn)

    def _function(self, name: str, function: Any, depth: int) -> None:
        if isinstance(function, functools.partial):
            self._queue(name, function.func, depth + 1, of_loss_fn=True)
            for index, value in enumerate(function.args):
                self._argument(_argument(function.func, index), value, depth)
            for keyword, value in function.keywords.items():
                self._argument(keyword, value, depth)
            return
        if isinstance(function, MethodType):
            # At the method's own depth, so that `loss.compute` counts as `loss` itself.
            self._queue(name, function.__self__, depth, of_loss_fn=True)
            self._queue(name, function.__func__, depth, of_loss_fn=True)
            return
        if vars(function):
            self._table(Table(function.__name__, vars(function), own=True, of_loss_fn=True), depth)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._table(Table(variable, cell, of_loss_fn=True), depth)
        defaults = function.__defaults__ or ()
        # The defaults belong to the last positional arguments.
        for index, value in enumerate(defaults, function.__code__.co_argcount - len(defaults)):
            self._argument(_argument(function, index), value, depth)
        for keyword, value in (function.__kwdefaults__ or {}).items():
            self._argument(keyword, value, depth)
        # Only globals that the code names, because a notebook has many others.
        named = frozenset(_names(function.__code__)) & function.__globals__.keys()
        self._table(Table("", function.__globals__, named, of_loss_fn=True), depth)

    def _class(self, name: str, kind: type, *, of_loss_fn: bool) -> None:
        for each in kind.__mro__:
            if not _is_foreign(each) and self._enter(each):
                self._table(Table(name, each, own=True, of_loss_fn=of_loss_fn), 0)

    def _argument(self, name: str, value: Any, depth: int) -> None:
        """Record the binding of an argument, of which only the content can change."""
        # In a new cell, because an argument has no table of its own.
        self._table(Table(name, CellType(value), of_loss_fn=True), depth)

    def _table(self, table: Table, depth: int) -> None:
        """Record a table, and queue the values that are bound in it."""
        self.tables.append(table)
        for key, value in table.read().items():
            self._queue(table.name_of(key), value, depth + 1, of_loss_fn=table.of_loss_fn)

    def _queue(self, name: str, value: Any, depth: int, *, of_loss_fn: bool) -> None:
        # These types refer to nothing that could be followed.
        if value is not None and not isinstance(value, Tensor | int | float | str | bytes):
            self.queue.append((name, value, depth, of_loss_fn))

    def _enter(self, value: Any) -> bool:
        if id(value) in self._entered:
            return False
        self._entered[id(value)] = value
        return True


def _attributes(name: str, module: nn.Module) -> Table:
    """Return the attributes of a module; of torch's own modules only tensors."""
    if not _is_foreign(type(module)):
        return Table(name, module.__dict__, own=True)
    # Not numbers and lists, because DistributedDataParallel, for example, counts its iterations in them.
    tensors = (key for key, value in module.__dict__.items() if isinstance(value, Tensor))
    return Table(name, module.__dict__, frozenset(tensors), own=True)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that a function's code uses, including its inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _argument(function: Any, index: int) -> str:
    code = getattr(function, "__code__", None)
    return code.co_varnames[index] if code is not None and index < code.co_argcount else f"argument {index}"


def _slots_of(value: Any) -> frozenset[str] | None:
    """Return the slots of an object of a user's class, empty if it has only a `__dict__`; None for others."""
    kind = type(value)
    if kind is not SimpleNamespace and (_is_foreign(kind) or _package(kind) in _HOSTS):
        return None
    found = frozenset(
        name
        for each in kind.__mro__
        if "__slots__" in vars(each)  # members of classes written in C may be read-only
        for name, member in vars(each).items()
        if isinstance(member, MemberDescriptorType)
    )
    return found if found or isinstance(getattr(value, "__dict__", None), dict) else None


def _is_foreign(kind: type) -> bool:
    """Return whether a class belongs to torch, NumPy, Python or this library."""
    return _package(kind) in _FOREIGN


def is_metric(module: nn.Module) -> bool:
    """Return whether a module is a metric of torchmetrics, whose state must change once per micro-batch.

    Examples:
        >>> is_metric(nn.Linear(1, 1))
        False
    """
    return any(_package(kind) == "torchmetrics" for kind in type(module).__mro__)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
