"""Parser of solver files, and its errors with line and column."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superbatch.caffe import (
    NetState,
    PrototxtError,
    SolverConfig,
    parse_solver,
    read_solver,
    solver_text,
)
from superbatch.caffe.config import FLOATS, INTS, POLICIES, TYPES, float32
from superbatch.caffe.text_format import parse
from superbatch.errors import InputError

FIXED = 'lr_policy: "fixed" '

REAL = """
# The train/test net protocol buffer definition
net: "examples/mnist/lenet_train_test.prototxt"
# test_iter specifies how many forward passes the test should carry out.
test_iter: 100
test_interval: 500
base_lr: 0.01
momentum: 0.9
weight_decay: 0.0005
# The learning rate policy
lr_policy: "inv"
gamma: 0.0001
power: 0.75
display: 100
max_iter: 10000
snapshot: 5000
snapshot_prefix: "examples/mnist/lenet"
solver_mode: GPU
"""


OPEN = ("net: 'a", "max_iter: ", "net_param { name: 'x'")
"""Texts whose mistake is that they end."""


def test_a_typical_file(tmp_path: Path) -> None:
    file = tmp_path / "solver.prototxt"
    file.write_text(REAL, encoding="utf-8")
    assert read_solver(file) == SolverConfig(
        net="examples/mnist/lenet_train_test.prototxt",
        test_iter=(100,),
        test_interval=500,
        base_lr=0.01,
        momentum=0.9,
        weight_decay=0.0005,
        lr_policy="inv",
        gamma=0.0001,
        power=0.75,
        display=100,
        max_iter=10000,
        snapshot=5000,
        snapshot_prefix="examples/mnist/lenet",
    )
    file.write_bytes(b"\xef\xbb\xbf" + REAL.replace("\n", "\r\n").encode())
    assert read_solver(str(file)).max_iter == 10000


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.prototxt' cannot be read: No such file or directory. Pass"):
        read_solver(tmp_path / "no.prototxt")
    (tmp_path / "model").write_bytes(b"\xff\x00")
    with pytest.raises(InputError, match="it is a binary file"):
        read_solver(tmp_path / "model")


def test_defaults_are_caffes() -> None:
    config = parse_solver(FIXED)
    assert (config.iter_size, config.average_loss, config.type) == (1, 1, "SGD")
    assert (config.clip_gradients, config.regularization_type) == (-1.0, "L2")
    assert (config.delta, config.momentum2, config.rms_decay) == tuple(map(float32, (1e-8, 0.999, 0.99)))
    assert (config.solver_mode, config.snapshot_format, config.random_seed) == ("GPU", "BINARYPROTO", -1)
    assert config.test_initialization and config.snapshot_after_train and config.layer_wise_reduce


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("base_lr: 1", "base_lr", 1.0),
        ("base_lr: .5f", "base_lr", 0.5),
        ("base_lr: 5F", "base_lr", 5.0),
        ("base_lr: 2.", "base_lr", 2.0),
        ("base_lr: 1e-1", "base_lr", float32(0.1)),
        ("clip_gradients: -1", "clip_gradients", -1.0),
        ("clip_gradients: - 2.5", "clip_gradients", -2.5),
        ("clip_gradients: inf", "clip_gradients", math.inf),
        ("clip_gradients: 1e60", "clip_gradients", math.inf),
        ("max_iter: 0x10", "max_iter", 16),
        ("max_iter: 010", "max_iter", 8),
        ("device_id: -3", "device_id", -3),
        ("random_seed: 9223372036854775807", "random_seed", 2**63 - 1),
        ("debug_info: true", "debug_info", True),
        ("debug_info: 1", "debug_info", True),
        ("test_initialization: f", "test_initialization", False),
        ("solver_mode: CPU", "solver_mode", "CPU"),
        ("solver_mode: 0", "solver_mode", "CPU"),
        ("snapshot_format: HDF5", "snapshot_format", "HDF5"),
        ("solver_type: NESTEROV", "type", "Nesterov"),
        ("solver_type: 5", "type", "Adam"),
        ("stepvalue: 1 stepvalue: 2", "stepvalue", (1, 2)),
        ("stepvalue: [1, 2] stepvalue: 3", "stepvalue", (1, 2, 3)),
        ("stepvalue: []", "stepvalue", ()),
        ("net: 'a' \"b\"  # joined\n 'c'", "net", "abc"),
        (r'net: "a\"\\\x41\102\n"', "net", 'a"\\AB\n'),
        ("net: '\"'", "net", '"'),
        ("base_lr: 1; max_iter: 2, display: 3", "display", 3),
        ("train_state { phase: TRAIN level: 2 }", "train_state", NetState(phase="TRAIN", level=2)),
        ("train_state: < stage: 'a' stage: 'b'; >", "train_state", NetState(stage=("a", "b"))),
        ("test_state: [{level: 1}, {level: 2}]", "test_state", (NetState(level=1), NetState(level=2))),
        ("base_lr:1#x", "base_lr", 1.0),
    ],
)
def test_the_grammar(text: str, name: str, value: object) -> None:
    assert getattr(parse_solver(FIXED + text), name) == value


def test_nets_in_the_file_are_kept_verbatim() -> None:
    config = parse_solver(FIXED + "net_param { name: 'n' layer { name: 'd' top: 'x' top: 'y' } }")
    assert config.net_param is not None
    assert [field.name.text for field in config.net_param.fields] == ["name", "layer"]
    assert parse_solver(solver_text(config)) == config


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("base_lr 0.1", 1, 9, "'0.1': a colon is missing after base_lr. Write base_lr: and"),
        ("\n  base_rl: 0.1", 2, 3, "'base_rl': a solver has no such field. Write base_lr or"),
        ("zzz: 1", 1, 1, "Remove it"),
        ('net: "unterminated\nmax_iter: 1', 1, 6, 'the string is not closed on its line. Close it with "'),
        ("net: 'a", 1, 6, "the string is not closed on its line"),
        ("\tmax_iter: 1.5", 1, 12, "max_iter: 1.5: max_iter must be an integer"),
        ("max_iter: 1e3", 1, 11, "max_iter must be an integer"),
        ("max_iter: '1'", 1, 11, "max_iter must be an integer"),
        (
            "max_iter: 2147483648",
            1,
            11,
            "of 32 bits. Write a number from -2147483648 to 2147483647",
        ),
        ("max_iter: 09", 1, 11, "max_iter must be an integer"),
        ("base_lr: '0.1'", 1, 10, "base_lr must be a number"),
        ("base_lr: fast", 1, 10, "base_lr must be a number"),
        ("base_lr: 0x10", 1, 10, "base_lr must be a number"),
        ("base_lr: 06.9", 1, 10, "base_lr must be a number"),  # protobuf: a leading zero means octal
        ("base_lr: 1.5.2", 1, 10, "'1.5.'...: this is not a number"),
        ("max_iter: 10k", 1, 11, "this is not a number"),
        ("type: SGD", 1, 7, 'type must be a string. Write type: "..."'),
        ("debug_info: yes", 1, 13, "debug_info must be a bool. Write true or false"),
        ("solver_mode: TPU", 1, 14, "must be one of CPU, GPU"),
        ('solver_mode: "GPU"', 1, 14, "must be one of CPU, GPU. Write CPU, without quotes"),
        ("solver_mode: 2", 1, 14, "must be one of CPU, GPU"),
        (
            "max_iter: 1\nbase_lr: 1 max_iter: 2",
            2,
            12,
            "already given in line 1, column 1. Remove one",
        ),
        ("max_iter: [1]", 1, 1, "this field takes one value, not a list"),
        ("stepvalue: [1 2]", 1, 15, "a comma is missing in the list of stepvalue"),
        ("max_iter: 1,,", 1, 13, "',': a field name is expected"),
        ("max_iter:\nbase_lr: 1", 2, 8, "':': a field name is expected"),
        ("max_iter: ", 1, 11, "the end of the file: max_iter has no value"),
        ("max_iter: -'1'", 1, 12, "max_iter has no value"),
        ("max_iter { }", 1, 1, "max_iter takes a value, not fields"),
        ("net_param: 'x'", 1, 12, "net_param must be a message"),
        ("net_param { name: 'x'", 1, 22, "opened in line 1, column 11 is not closed. Close it with }"),
        ("net_param { name: 'x' >", 1, 23, "'>': a field name is expected"),
        ("train_state { phase: TRAIN lvl: 1 }", 1, 28, "a NetState has no such field. Write level"),
        ("max_iter: 1 }", 1, 13, "'}': a field name is expected"),
        ("max_iter: 1 $", 1, 13, "no field or value starts with this character"),
        (r'net: "\q"', 1, 6, r"the unknown escape \q"),
        (r'net: "\777"', 1, 6, "the unknown escape"),
        (r'net: "\xff"', 1, 6, "the string is not valid UTF-8"),
        ("solver_type: SGD type: 'SGD'", 1, 1, "solver_type and type are both given. Remove solver_type"),
        ("type: 'Adagrad'", 1, 1, 'type: "Adagrad": Caffe supports SGD, Nesterov, AdaGrad'),
        ("iter_size: 0", 1, 1, "iter_size: 0: at least 1 is needed"),
        ("average_loss: 0", 1, 1, "at least 1 is needed"),
        ("base_lr: nan", 1, 1, "every weight would become NaN"),
        ("base_lr: 1e39", 1, 1, "base_lr: inf: every weight would become NaN"),
        ("type: 'AdaGrad'\nmomentum: 0.9", 2, 1, "momentum: 0.9: Caffe's AdaGrad has no momentum"),
        ("type: 'RMSProp' rms_decay: 1", 1, 17, "below 1"),
        ("type: 'Adam' momentum: 1", 1, 14, "momentum: 1: Adam needs a value of at least 0 and below 1"),
        ("max_iter: -1", 1, 1, "the number of updates cannot be negative"),
        ("regularization_type: 'L3'", 1, 1, "Caffe supports L2, L1"),
    ],
)
def test_an_error_has_line_and_column(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(PrototxtError) as caught:
        parse_solver(text if text in OPEN else text + "\n" + FIXED)
    error = caught.value
    assert (error.line, error.column) == (line, column), error
    assert message in str(error)
    assert re.fullmatch(
        rf"line {line}, column {column}: .+: .+\. (Close|Correct|Remove|Write) .+\.", str(error)
    )


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("base_lr: 1\n", 2, 1, "no lr_policy: Caffe supports fixed, step, exp"),
        ('\nlr_policy: "cosine"', 2, 1, 'lr_policy: "cosine"'),
        ('gamma: 1 lr_policy: "step"', 1, 10, 'no stepsize: lr_policy "step" needs a stepsize above 0'),
        ('lr_policy: "sigmoid" stepsize: 0', 1, 22, 'stepsize: 0: lr_policy "sigmoid" needs a stepsize'),
        ('lr_policy: "exp" gamma: -1', 1, 18, 'gamma: -1: lr_policy "exp" needs a gamma of 0 or more'),
        ('lr_policy: "poly"', 1, 1, 'no max_iter: lr_policy "poly" lowers the rate to 0 at max_iter'),
    ],
)
def test_a_policy_that_caffe_would_refuse(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(PrototxtError) as caught:
        parse_solver(text)
    assert (caught.value.line, caught.value.column) == (line, column), caught.value
    assert message in str(caught.value)


def test_deeply_nested_messages_do_not_exhaust_the_stack() -> None:
    with pytest.raises(PrototxtError, match="messages are nested more than 100 deep"):
        parse("a {" * 5000)


@given(st.text(alphabet="abz_ \n\t:;,<>{}[]#'\"\\-+.0179eExXfF", max_size=60))
def test_any_text_is_read_or_refused_with_a_position(text: str) -> None:
    """No other error is raised, and the position lies in the text."""
    place = place_of_error(text)
    if place is not None:
        lines = text.split("\n")
        assert 1 <= place[0] <= len(lines)
        assert 1 <= place[1] <= len(lines[place[0] - 1]) + 1


def place_of_error(text: str) -> tuple[int, int] | None:
    try:
        parse_solver(text)
    except PrototxtError as error:
        return error.line, error.column
    return None


def test_a_config_from_python_is_checked_too() -> None:
    with pytest.raises(
        InputError, match=r"iter_size=0 is not allowed: at least 1 is needed\. Write 1 or more\."
    ):
        SolverConfig(lr_policy="fixed", iter_size=0)
    with pytest.raises(InputError, match=r"base_lr='0\.1' is not a number\. Pass a float"):
        SolverConfig(lr_policy="fixed", base_lr="0.1")  # pyright: ignore[reportArgumentType]  (the mistake)
    with pytest.raises(InputError, match=r"max_iter=1\.5 is not an integer\. Pass an int"):
        SolverConfig(lr_policy="fixed", max_iter=1.5)  # pyright: ignore[reportArgumentType]  (the mistake)
    with pytest.raises(InputError, match="lr_policy='cosine'"):
        SolverConfig(lr_policy="cosine")  # pyright: ignore[reportArgumentType]  (the mistake)


def test_every_field_of_caffes_proto_is_known() -> None:
    """Field numbers 1 to 42; 30 is solver_type, 27 and 22 are repeated messages."""
    names = {field.name for field in dataclasses.fields(SolverConfig)} | {"solver_type"}
    assert len(names - {"ignored"}) == 42
    hints = get_type_hints(SolverConfig)
    assert all(hints[name] is float for name in FLOATS)
    assert all(hints[name] is int for name in INTS)
    assert sum(hint is float for hint in hints.values()) == len(FLOATS)
    assert sum(hint is int for hint in hints.values()) == len(INTS)


# -- round trips -----------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)
numbers = st.floats(0, 2.0**100, width=32, allow_subnormal=False)


@st.composite
def configs(draw: st.DrawFn) -> SolverConfig:
    kind = draw(st.sampled_from(TYPES))
    ints = st.integers(-(2**31), 2**31 - 1)
    values: dict[str, Any] = {
        "type": kind,
        "lr_policy": draw(st.sampled_from(POLICIES)),
        "net": draw(st.none() | texts),
        "test_net": tuple(draw(st.lists(texts, max_size=2))),
        "train_state": draw(
            st.none() | st.builds(NetState, level=ints, stage=st.lists(texts, max_size=2).map(tuple))
        ),
        "momentum": 0.0 if kind in ("AdaGrad", "RMSProp") else draw(st.floats(0, 0.875, width=32)),
        "max_iter": draw(st.integers(1, 2**31 - 1)),
        "stepsize": draw(st.integers(1, 2**31 - 1)),
        "stepvalue": tuple(draw(st.lists(ints, max_size=4))),
        "test_iter": tuple(draw(st.lists(ints, max_size=2))),
        "iter_size": draw(st.integers(1, 2**31 - 1)),
        "clip_gradients": draw(st.floats(width=32, allow_nan=False, allow_subnormal=False)),
        "random_seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "snapshot_format": draw(st.sampled_from(["HDF5", "BINARYPROTO"])),
        "solver_mode": draw(st.sampled_from(["CPU", "GPU"])),
        "debug_info": draw(st.booleans()),
        "test_initialization": draw(st.booleans()),
    }
    values |= {name: draw(numbers) for name in ("base_lr", "gamma", "power", "weight_decay", "delta")}
    return SolverConfig(**values)


@given(configs())
def test_a_written_config_is_read_unchanged(config: SolverConfig) -> None:
    assert parse_solver(solver_text(config)) == config


@settings(max_examples=40)
@given(configs(), st.randoms())
def test_layout_does_not_matter(config: SolverConfig, random: Any) -> None:
    """Order of single fields, comments, separators and line ends change nothing."""
    lines = solver_text(config).split("\n")[:-1]
    singles = [line for line in lines if not line.startswith(("test_net", "stepvalue", "test_iter"))]
    rest = [line for line in lines if line not in singles]
    random.shuffle(singles)
    ends = ["\n", " # a comment: { \n", ";\r\n", ",\n", "\n\n\t "]
    text = "".join(line + random.choice(ends) for line in singles + rest)
    assert parse_solver(text) == config
